"use strict";
// What is said of the neighbours in words and numbers.
const facts = (() => {
  function told(layer, query, found, picture) {
    if (found.weights.some(Number.isNaN)) return { weights: "not a number" };
    const cell = [picture.height / layer.inner[2], picture.width / layer.inner[3]], said = { neighbours: String(found.index.length) };
    const total = found.weights.reduce((sum, w) => sum + w, 0);
    if (query >= layer.before && total > 0) {
      const [row, column] = layer.centre(query);
      let distance = 0, placed = 0, small = 0, large = 0;
      found.index.forEach((key, slot) => {
        if (key < layer.before) return;
        const at = key - layer.before, dr = Math.floor(at / layer.cells[1]) - row, dc = at % layer.cells[1] - column;
        const far = Math.max(Math.abs(dr), Math.abs(dc)), w = found.weights[slot];
        distance += w * Math.hypot(dr * cell[0], dc * cell[1]);
        placed += w;
        small += far <= 1 ? w : 0;
        large += far <= 2 ? w : 0;
      });
      if (placed > 0) said["mean distance"] = `${(distance / placed).toFixed(1)} px`;
      said["weight in 3 × 3"] = `${(100 * small / total).toFixed(0)} %`;
      said["weight in 5 × 5"] = `${(100 * large / total).toFixed(0)} %`;
    }
    const shares = found.weights.map((w) => w / total).filter((w) => w > 0);
    said["effective number"] = Math.exp(-shares.reduce((sum, w) => sum + w * Math.log(w), 0)).toFixed(1);
    return said;
  }

  function tabulate(body, layer, found) {
    body.replaceChildren(...found.index.slice(0, 200).map((key, slot) => {
      const at = key - layer.before;
      const place = at < 0 ? ["class", "–"] : [Math.floor(at / layer.cells[1]) - layer.inner[0], at % layer.cells[1] - layer.inner[1]];
      return controls.make("tr", {}, ...[slot + 1, ...place, found.scores[slot].toPrecision(4), found.weights[slot].toPrecision(3)].map((each) => controls.make("td", {}, String(each))));
    }));
  }

  return { told, tabulate };
})();
