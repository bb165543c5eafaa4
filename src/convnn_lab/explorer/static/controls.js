"use strict";
// The controls: each shows one setting and changes it.
const controls = (() => {
  const make = (tag, given = {}, ...inside) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(given)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null) element.setAttribute(name, value);
    }
    element.append(...inside);
    return element;
  };

  const names = {
    dot: "dot product", scaled_dot: "scaled dot product", cosine: "cosine", euclidean: "Euclidean distance",
    sqeuclidean: "squared Euclidean", pearson: "Pearson correlation", manhattan: "Manhattan distance",
    chebyshev: "Chebyshev distance", uniform: "uniform", softmax: "softmax", softmax_at: "softmax at T",
    softmin: "softmin", sparsemax: "sparsemax", window: "the layer's window",
  };

  // k runs over every number of neighbours, with more room for the small ones; the end is all of them.
  const steps = 1000;
  const toK = (place, most) => (place >= steps ? "all" : Math.max(1, Math.min(most, Math.round(Math.exp(Math.log(most) * place / steps)))));
  const fromK = (k, most) => (k === "all" || k >= most && most === 1 ? steps : Math.min(steps - 1, Math.round(steps * Math.log(k) / Math.log(most || 2))));

  const build = (form, change, play) => {
    const parts = {};
    const range = (name, label, least, most, step, read) => {
      const output = make("output", { for: `c-${name}` });
      const input = make("input", { type: "range", id: `c-${name}`, min: least, max: most, step,
        oninput: () => change(read ? read(input) : { [name]: Number(input.value) }) });
      parts[name] = { input, output };
      return make("div", { class: "field", id: `f-${name}` }, make("label", { for: `c-${name}` }, label, output), input);
    };
    const select = (name, label, options) => {
      const input = make("select", { id: `c-${name}`, onchange: () => change({ [name]: input.value }) },
        ...options.map(([value, text]) => make("option", { value }, text)));
      parts[name] = { input };
      return make("div", { class: "field", id: `f-${name}` }, make("label", { for: `c-${name}` }, label), input);
    };
    const number = (name, label, least, most) => {
      const input = make("input", { type: "number", id: `c-${name}`, min: least, max: most, step: 1, onchange: () => {
        const value = Math.round(Number(input.value));
        change({ [name]: Number.isFinite(value) ? Math.min(Math.max(value, least), most) : least });
      } });
      parts[name] = { input };
      return make("div", { class: "field", id: `f-${name}` }, make("label", { for: `c-${name}` }, label), input);
    };
    const choice = (name, label, options) => {
      const buttons = options.map(([value, text]) =>
        make("button", { type: "button", value, "aria-pressed": "false", onclick: () => change({ [name]: value }) }, text));
      parts[name] = { buttons };
      return make("div", { class: "field", id: `f-${name}` }, make("span", { class: "label", id: `l-${name}` }, label),
        make("div", { class: "choice", role: "group", "aria-labelledby": `l-${name}` }, ...buttons));
    };
    const group = (name, ...inside) => {
      parts[name] = { group: make("div", { class: "group" }, ...inside) };
      return parts[name].group;
    };

    const dial = range("share", "From space to features", 0, 1, 0.005);
    dial.classList.add("dial");
    const playing = make("button", { type: "button", id: "play", "aria-label": "Move the dial from convolution to attention and back", onclick: play }, "▶ play");
    dial.append(make("div", { class: "ends" }, make("span", {}, "convolution"), playing, make("span", {}, "attention")));
    parts.own = { button: make("button", { type: "button", class: "own", id: "own", "aria-pressed": "false", onclick: () => change({}, true) }, "As the layer chooses") };

    form.append(
      dial,
      range("k", "Neighbours, k", 0, steps, 1, (input) => ({ k: toK(Number(input.value), parts.k.most) })),
      select("similarity", "Similarity of features", search.similarities.map((each) => [each, names[each]])),
      select("space", "Similarity of places", ["chebyshev", "euclidean", "sqeuclidean", "manhattan", "window"].map((each) => [each, names[each]])),
      select("weighting", "Weights", search.weightings.map((each) => [each, names[each]])),
      group("heating", range("temperature", "Temperature T", -3, 2, 0.01, (input) => ({ temperature: Number((10 ** Number(input.value)).toPrecision(3)) }))),
      choice("candidates", "Candidates", [["all", "all"], ["random", "random"], ["grid", "grid"], ["own", "layer's"]]),
      group("narrowing",
        range("count", "How many, r", 0, steps, 1, (input) => ({ count: parts.count.read(Number(input.value)) })),
        number("seed", "Seed", 0, 4294967295)),
      select("mask", "Mask", [["none", "none"], ["causal", "causal"], ["window", "window"], ["bigbird", "BigBird"], ["own", "the layer's"]]),
      group("masking",
        range("radius", "Radius in tokens", 0, steps, 1, (input) => ({ radius: Math.round(Math.expm1(Math.log1p(parts.k.keys) * input.value / steps)) })),
        make("div", { class: "row", id: "bigbird" }, number("globals", "Globals", 0, 64), number("random", "Random", 0, 64), number("maskSeed", "Seed", 0, 100000))),
      select("self", "The query itself", [["any", "a key like any other"], ["first", "always the first neighbour"], ["one", "always first, with score 1"]]),
      choice("style", "Drawn as", [["heat", "heat"], ["lines", "lines"], ["both", "both"]]),
      parts.own.button,
      make("p", { class: "help" }, "Click or drag over the picture, or focus it and use the ", make("kbd", {}, "arrow keys"), ". ",
        make("kbd", {}, "["), " and ", make("kbd", {}, "]"), " change the layer, ", make("kbd", {}, ","), " and ", make("kbd", {}, "."), " the head."),
    );

    const shown = (name, value, text, place) => {
      parts[name].input.value = place ?? value;
      const { min, max } = parts[name].input;
      parts[name].input.style.setProperty("--at", `${100 * (parts[name].input.value - min) / (max - min)}%`);
      parts[name].output.value = text ?? value;
      parts[name].input.setAttribute("aria-valuetext", text ?? value);
    };
    const pressed = (name, value) => parts[name].buttons.forEach((each) => each.setAttribute("aria-pressed", each.value === value));

    return (s, layer, style, own) => {
      const most = search.most(layer, s);
      parts.k.most = most;
      parts.k.keys = layer.keys;
      shown("share", s.share, s.share === 0 ? "0, space" : s.share === 1 ? "1, features" : s.share.toFixed(3));
      shown("k", s.k, s.k === "all" ? `all ${most}` : `${Math.min(s.k, most)} of ${most}`, fromK(s.k, most));
      shown("temperature", s.temperature, String(s.temperature), Math.log10(s.temperature));
      // On a map a grid has as many cells on every side; elsewhere any number will do.
      const square = s.candidates === "grid" && !layer.before, top = square ? Math.floor(Math.sqrt(layer.keys)) : layer.keys;
      parts.count.read = (place) => { const n = toK(Math.min(place, steps - 1), top); return square ? n * n : n; };
      shown("count", s.count, `${Math.min(s.count, layer.keys)} of ${layer.keys}`, fromK(square ? Math.round(Math.sqrt(s.count)) : s.count, top));
      shown("radius", s.radius, s.radius, Math.round(steps * Math.log1p(s.radius) / Math.log1p(layer.keys)));
      for (const name of ["similarity", "space", "weighting", "mask", "self", "seed", "globals", "random", "maskSeed"]) parts[name].input.value = s[name];
      pressed("candidates", s.candidates);
      pressed("style", style);
      parts.space.input.closest(".field").hidden = s.share === 1;
      parts.similarity.input.closest(".field").hidden = s.share === 0;
      parts.heating.group.hidden = s.weighting !== "softmax_at";
      parts.narrowing.group.hidden = !["random", "grid"].includes(s.candidates);
      parts.seed.input.closest(".field").hidden = s.candidates !== "random";
      parts.masking.group.hidden = !["window", "bigbird"].includes(s.mask);
      document.getElementById("bigbird").hidden = s.mask !== "bigbird";
      parts.candidates.buttons[3].hidden = !layer.ownCandidates;
      parts.mask.input.options[4].hidden = !layer.ownMask;
      parts.space.input.options[4].hidden = !layer.kernel;
      parts.own.button.setAttribute("aria-pressed", own);
    };
  };

  return { build, make };
})();
