"use strict";
// The view as the part of an address behind #, and back: what comes back is only what the controls could have said.
const link = (() => {
  const listed = {
    similarity: search.similarities, weighting: search.weightings, self: ["any", "first", "one"],
    space: ["chebyshev", "euclidean", "sqeuclidean", "manhattan", "window"], candidates: ["all", "random", "grid", "own"],
    mask: ["none", "causal", "window", "bigbird", "own"],
  };
  const ends = { share: [0, 1], temperature: [1e-3, 100] };
  const whole = {
    count: [1, 1e6], seed: [0, 4294967295], radius: [0, 1e6], globals: [0, 64], random: [0, 64], maskSeed: [0, 1e5],
  };
  const between = (value, [least, most], other) => {
    const given = value === null || value === undefined || value === "" ? NaN : Number(value);
    return Number.isFinite(given) ? Math.min(Math.max(given, least), most) : other;
  };

  const words = (state) => {
    const joined = (part) => state.panes.map((each) => each[part]).join();
    const said = new URLSearchParams({
      picture: state.picture, x: state.x.toFixed(4), y: state.y.toFixed(4), token: state.token, layers: joined("layer"),
      heads: joined("head"), style: state.style,
    });
    if (!state.own) for (const [name, value] of Object.entries(state.settings)) said.set(name, value);
    return said.toString();
  };

  const settings = (said, known) => {
    const s = { ...known };
    for (const [name, values] of Object.entries(listed)) if (values.includes(said.get(name))) s[name] = said.get(name);
    for (const [name, range] of Object.entries(ends)) s[name] = between(said.get(name), range, s[name]);
    for (const [name, range] of Object.entries(whole)) s[name] = Math.round(between(said.get(name), range, s[name]));
    s.k = said.get("k") === "all" ? "all" : Math.round(between(said.get("k"), [1, 1e6], 9));
    return s;
  };

  const read = (hash, state, panes) => {
    const said = new URLSearchParams(hash.slice(1));
    if (![...said.keys()].length) return;
    state.picture = Math.round(between(said.get("picture"), [0, panes[0].views.length - 1], 0));
    for (const side of ["x", "y"]) state[side] = between(said.get(side), [0, 1], 0.5);
    state.token = Math.round(between(said.get("token"), [-1, 1000], -1));
    if (["heat", "lines", "both"].includes(said.get("style"))) state.style = said.get("style");
    const [layers, heads] = ["layers", "heads"].map((name) => (said.get(name) ?? "").split(","));
    state.panes = panes.map((pane, number) => ({
      layer: Math.round(between(layers[number], [0, pane.views[state.picture].layers.length - 1], 0)),
      head: Math.round(between(heads[number], [0, 1000], 0)),
    }));
    state.own = !said.has("k");
    if (!state.own) state.settings = settings(said, panes[0].views[state.picture].layers[state.panes[0].layer].chooses);
  };

  return { words, read };
})();
