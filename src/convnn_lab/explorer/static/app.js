"use strict";
// The page: what is looked at, with which settings; one change, one search, one drawing.
const explorer = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { make } = controls, by = (id) => document.getElementById(id);
  const panes = data.panes.map((pane) => ({
    ...pane, views: pane.views.map((view) => ({ ...view, layers: view.layers.map(decode.layer) })),
  }));
  const state = {
    picture: 0, x: 0.5, y: 0.5, token: -1, style: "both", own: true,
    settings: { ...panes[0].views[0].layers[0].chooses }, panes: panes.map(() => ({ layer: 0, head: 0 })),
  };
  const images = data.pictures.map((picture) => {
    const image = new Image();
    image.src = `data:${picture.type};base64,${by(picture.source).textContent.trim()}`;
    return image;
  });
  const view = (number) => panes[number].views[state.picture];
  const layerOf = (number) => view(number).layers[Math.min(state.panes[number].layer, view(number).layers.length - 1)];
  const headOf = (number) => Math.min(state.panes[number].head, layerOf(number).heads - 1);

  // What the settings are for a layer: its own, or those of the controls as far as it knows them.
  const settingsFor = (layer) => {
    const s = { ...(state.own ? layer.chooses : state.settings) };
    if (s.space === "window" && !layer.kernel) s.space = "chebyshev";
    if (s.candidates === "own" && !layer.ownCandidates) s.candidates = "all";
    if (s.mask === "own" && !layer.ownMask) s.mask = "none";
    if (s.candidates === "grid" && !layer.before) s.count = Math.round(Math.sqrt(s.count)) ** 2;
    return s;
  };
  const queryOf = (layer) => (state.token >= 0 && state.token < layer.before ? state.token : layer.at(state.x, state.y));

  // ---- one pane ----
  const built = panes.map((pane, number) => {
    const canvas = make("canvas", { class: "view", tabindex: 0, role: "img", "data-pane": number });
    const layers = make("select", { "aria-label": `Layer of ${pane.name}`, onchange: () => pick(number, { layer: Number(layers.value) }) });
    const heads = make("select", { "aria-label": `Head of ${pane.name}`, onchange: () => pick(number, { head: Number(heads.value) }) });
    const headLabel = make("label", {}, "Head", heads), tokens = make("div", { class: "tokens" });
    const facts = make("dl", { class: "facts" }), low = make("span"), high = make("span"), notes = make("ul", { class: "notes" });
    const body = make("tbody"), table = make("table", {}, make("thead", {}, make("tr", {},
      ...["rank", "row", "column", "score", "weight"].map((name) => make("th", { scope: "col" }, name)))), body);
    const more = make("details", { ontoggle: () => refresh() }, make("summary", {}, "Neighbours as a table"), make("div", { class: "scroll", tabindex: 0 }, table));
    const scale = make("div", { class: "scale" });
    scale.style.background = draw.gradient;
    const heading = make("h2", {}, pane.name);
    heading.hidden = panes.length === 1;
    by("panes").append(make("article", { class: "pane" },
      make("header", {}, heading, make("label", {}, "Layer", layers), headLabel),
      make("div", { class: "wrap" }, canvas), tokens, scale, make("div", { class: "ends" }, low, high), facts, notes, more));
    listen(canvas, number);
    return { canvas, layers, heads, headLabel, tokens, facts, low, high, notes, body, more };
  });

  function fill(number) {
    const parts = built[number], layer = layerOf(number);
    parts.layers.replaceChildren(...view(number).layers.map((each, place) => make("option", { value: place }, each.name)));
    parts.layers.value = view(number).layers.indexOf(layer);
    parts.heads.replaceChildren(...Array.from({ length: layer.heads }, (_, head) => make("option", { value: head }, String(head))));
    parts.heads.value = headOf(number);
    parts.headLabel.hidden = layer.heads === 1;
    parts.tokens.replaceChildren(...Array.from({ length: layer.before }, (_, token) => make("button", {
      type: "button", "aria-pressed": "false", onclick: () => set({ token }) }, layer.before === 1 ? "class token" : `token ${token}`, make("span"))));
    const every = [...panes[number].notes, ...view(number).notes, ...layer.notes];
    parts.notes.replaceChildren(...every.map((note) => make("li", {}, note)));
  }

  function size(number) {
    const { canvas } = built[number], picture = data.pictures[view(number).picture];
    const room = canvas.parentElement.clientWidth, tall = Math.max(280, window.innerHeight * 0.62);
    const wide = Math.min(room, tall * picture.width / picture.height), ratio = window.devicePixelRatio || 1;
    canvas.style.width = `${wide}px`;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(wide * ratio * picture.height / picture.width);
  }

  const compute = (number) => {
    const layer = layerOf(number), s = settingsFor(layer), query = queryOf(layer);
    return { layer, s, query, head: headOf(number), found: search.neighbours(layer, headOf(number), query, s) };
  };

  function show(number) {
    const parts = built[number], now = compute(number), { layer, found, query } = now, seen = view(number).picture;
    const unit = (window.devicePixelRatio || 1) * Math.max(0.7, Math.min(1.4, built[number].canvas.clientWidth / 500));
    const strength = draw.view(parts.canvas, images[seen], data.pictures[seen], layer, query, found, state.style, unit);
    Array.from(parts.tokens.children).forEach((button, token) => {
      button.setAttribute("aria-pressed", token === query);
      button.lastChild.style.width = `${100 * strength[token]}%`;
    });
    const told = facts.told(layer, query, found, data.pictures[seen]);
    parts.facts.replaceChildren(...Object.entries(told).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    const most = Math.max(0, ...found.weights);
    parts.low.textContent = "weight 0 (on a scale of square roots)";
    parts.high.textContent = found.weights.length ? most.toPrecision(3) : "no neighbour";
    const where = query < layer.before ? `class token ${query}` : `row ${layer.place(query)[0]}, column ${layer.place(query)[1]}`;
    const said = `${layer.name}, ${where}: ${found.index.length} neighbours` + (told["mean distance"] ? `, ${told["mean distance"]} away on average` : "");
    parts.canvas.setAttribute("aria-label", `Picture ${view(number).name}. ${said}. Use the arrow keys to move.`);
    if (parts.more.open) facts.tabulate(parts.body, layer, found);
    built[number].now = now;
    return said;
  }

  // ---- changes ----
  let showControls = null, later = 0, waiting = 0;

  function refresh() {
    const said = panes.map((_, number) => show(number));
    showControls(settingsFor(layerOf(0)), layerOf(0), state.style, state.own);
    clearTimeout(later);
    later = setTimeout(() => { by("live").textContent = said.join(". "); write(); }, 300);
    if (!waiting) waiting = setTimeout(() => { waiting = 0; strip(); }, 60);
  }

  // Change settings, or go back to the layer's own.
  function change(some, own = false) {
    stop();
    alter(some, own);
  }
  function alter(some, own = false) {
    const { style, ...settings } = some;
    if (style) state.style = style;
    if (own) state.own = true;
    else if (Object.keys(settings).length) {
      if (state.own) state.settings = settingsFor(layerOf(0));
      state.settings = { ...state.settings, ...settings };
      state.own = false;
    }
    refresh();
  }
  function set(some) { Object.assign(state, some); refresh(); }
  function pick(number, some) { Object.assign(state.panes[number], some); fill(number); size(number); refresh(); }
  function choose(picture) {
    state.picture = picture;
    Array.from(by("gallery").children).forEach((each, place) => each.setAttribute("aria-pressed", place === picture));
    panes.forEach((_, number) => { fill(number); size(number); });
    refresh();
  }

  let timer = 0;
  function stop() { cancelAnimationFrame(timer); timer = 0; by("play").textContent = "▶ play"; }
  function play() {
    if (timer) { stop(); return; }
    const start = performance.now(), from = settingsFor(layerOf(0)).share;
    const turn = (now) => {
      const phase = ((now - start) / 6000 + from / 2) % 1;
      alter({ share: Math.round(1000 * (1 - Math.abs(1 - 2 * phase))) / 1000 });
      timer = requestAnimationFrame(turn);
    };
    by("play").textContent = "❚❚ stop";
    timer = requestAnimationFrame(turn);
  }

  // ---- pointer and keys ----
  function listen(canvas, number) {
    const point = (event) => {
      const box = canvas.getBoundingClientRect(), at = draw.frame(canvas.width, canvas.height, layerOf(number));
      const x = ((event.clientX - box.left) / box.width * canvas.width - at.left) / at.width;
      const y = ((event.clientY - box.top) / box.height * canvas.height - at.top) / at.height;
      set({ x: Math.min(Math.max(x, 0), 1), y: Math.min(Math.max(y, 0), 1), token: -1 });
    };
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); point(event); });
    canvas.addEventListener("pointermove", (event) => { if (event.buttons) point(event); });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }, move = moves[event.key];
      const layer = layerOf(number), count = view(number).layers.length, now = state.panes[number];
      const turned = { "[": { layer: (now.layer + count - 1) % count }, "]": { layer: (now.layer + 1) % count },
        ",": { head: (headOf(number) + layer.heads - 1) % layer.heads }, ".": { head: (headOf(number) + 1) % layer.heads } }[event.key];
      if (!move && !turned) return;
      event.preventDefault();
      if (turned) { pick(number, turned); return; }
      const [row, column] = layer.place(Math.max(layer.before, queryOf(layer))), far = event.shiftKey ? 5 : 1;
      const clamp = (value, length) => Math.min(Math.max(value, 0), length - 1);
      const [top, left, height, width] = layer.inner;
      set({ token: -1, x: (layer.ownColumns[clamp(column + far * move[0], layer.columns.length)] - left + 0.5) / width,
        y: (layer.ownRows[clamp(row + far * move[1], layer.rows.length)] - top + 0.5) / height });
    });
  }

  // ---- all layers and heads at once, small ----

  let queue = 0;
  function strip() {
    const layer = layerOf(0), layers = view(0).layers, many = layers.length > 1;
    const entries = [...(many ? layers.map((each, place) => ({ layer: place, head: Math.min(headOf(0), each.heads - 1), name: each.name })) : []),
      ...(layer.heads > 1 ? Array.from({ length: layer.heads }, (_, head) => ({ layer: layers.indexOf(layer), head, name: `head ${head}`, inner: true })) : [])];
    const key = JSON.stringify([state.picture, entries.map((each) => [each.layer, each.name])]), holder = by("strip");
    if (holder.dataset.key !== key) {
      holder.dataset.key = key;
      holder.replaceChildren(...entries.map((entry) => make("button", { type: "button", title: entry.name,
        onclick: () => pick(0, entry.inner ? { head: entry.head } : { layer: entry.layer }) },
      make("canvas", { width: 168, height: 168, "aria-hidden": "true" }), make("span", {}, entry.name))));
    }
    const turn = ++queue, picture = data.pictures[view(0).picture];
    const paint = (place) => {
      if (turn !== queue || place >= entries.length) return;
      const entry = entries[place], each = layers[entry.layer], button = holder.children[place], canvas = button.firstChild;
      canvas.height = Math.round(168 * picture.height / picture.width);
      const query = queryOf(each), found = search.neighbours(each, entry.head, query, settingsFor(each));
      draw.view(canvas, images[view(0).picture], picture, each, query, found, "heat", 0);
      button.setAttribute("aria-pressed", entry.inner ? entry.head === headOf(0) : each === layer);
      setTimeout(() => paint(place + 1));
    };
    paint(0);
  }

  // ---- the view as a link, as a picture ----

  let written = "";
  function write() {
    written = `#${link.words(state)}`;
    try { history.replaceState(null, "", written); } catch { location.hash = written; }
  }
  function read() {
    if (location.hash !== written) link.read(location.hash, state, panes);
  }
  function save() {
    const whole = draw.together(built.map((each) => each.canvas));
    whole.toBlob((blob) => {
      const address = URL.createObjectURL(blob), link = make("a", { href: address, download: `${view(0).name.replace(/[^\w.-]+/g, "_")}-neighbours.png` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
    }, "image/png");
  }
  async function copy() {
    write();
    const button = by("link"), kept = "Copy link";
    try { await navigator.clipboard.writeText(location.href); button.textContent = "Copied"; } catch { button.textContent = "See the address bar"; }
    setTimeout(() => { button.textContent = kept; }, 1500);
  }

  // ---- begin ----
  by("title").textContent = data.title;
  by("subtitle").textContent = `convnn ${data.version}: for every query the k nearest keys, from convolution to attention`;
  by("link").addEventListener("click", copy);
  by("save").addEventListener("click", save);
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  if (panes[0].views.length > 1) {
    by("gallery").hidden = false;
    by("gallery").append(...panes[0].views.map((each, place) => make("button", { type: "button", title: each.name, "aria-label": each.name, onclick: () => choose(place) },
      make("img", { src: images[each.picture].src, alt: "" }))));
  }
  showControls = controls.build(by("controls"), change, play);
  window.addEventListener("hashchange", () => { read(); choose(state.picture); });
  let resized = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(() => choose(state.picture)); });
  read();
  const ready = Promise.all(images.map((image) => image.decode())).then(() => choose(state.picture));

  return { ready, state, change, set, pick, choose, neighbours: (number = 0) => built[number].now, layer: (pane, picture, layer) => panes[pane].views[picture].layers[layer], search };
})();
