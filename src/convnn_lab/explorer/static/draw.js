"use strict";
// Drawing neighbours over a picture. Heat is one small image, a pixel for a cell, stretched over the picture.
const draw = (() => {
  const stops = [[49, 18, 98], [131, 24, 114], [211, 53, 67], [249, 142, 37], [254, 240, 138]];
  const colour = (share) => {
    const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    return stops[low].map((part, channel) => Math.round(part + (stops[low + 1][channel] - part) * (at - low)));
  };
  const ink = (share, alpha = 1) => `rgb(${colour(share).join(" ")} / ${alpha})`;
  const gradient = `linear-gradient(90deg, ${stops.map((stop) => `rgb(${stop.join(" ")})`).join(", ")})`;

  // Where on the canvas the picture lies: a band around it holds the padding, if there is any.
  const frame = (width, height, layer) => {
    const padded = layer.inner[2] !== layer.cells[0] || layer.inner[3] !== layer.cells[1];
    const band = padded ? Math.max(8, Math.round(Math.min(width, height) * 0.035)) : 0;
    return { band, left: band, top: band, width: width - 2 * band, height: height - 2 * band };
  };

  const squeeze = (place, start, length, band) => {
    if (place < 0) return start + Math.max(place * length, -band);
    return place > 1 ? start + length + Math.min((place - 1) * length, band) : start + place * length;
  };
  const box = (layer, key, at) => {
    const [left, top, right, bottom] = layer.corners(key);
    const x = squeeze(left, at.left, at.width, at.band), y = squeeze(top, at.top, at.height, at.band);
    return [x, y, squeeze(right, at.left, at.width, at.band) - x, squeeze(bottom, at.top, at.height, at.band) - y];
  };

  const sheet = document.createElement("canvas");
  // A pixel for every cell under the picture: dark where nobody is chosen, hot where weight is.
  const heat = (context, layer, strength, at) => {
    const [top, left, height, width] = layer.inner;
    sheet.width = width;
    sheet.height = height;
    const pixels = new ImageData(width, height);
    for (let row = 0; row < height; row++) for (let column = 0; column < width; column++) {
      const share = strength[layer.before + (row + top) * layer.cells[1] + column + left], place = 4 * (row * width + column);
      const hot = share > 0 ? colour(share) : [9, 10, 16];
      for (let channel = 0; channel < 3; channel++) pixels.data[place + channel] = hot[channel];
      pixels.data[place + 3] = share > 0 ? 255 * (0.34 + 0.3 * share) : 255 * 0.55;
    }
    const small = sheet.getContext("2d");
    small.putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, at.left, at.top, at.width, at.height);
  };

  // What each key weighs, as the square root of its share of the heaviest: faint weights can be seen.
  const strengths = (layer, found) => {
    const result = new Float32Array(layer.keys), most = Math.max(0, ...found.weights.map((w) => (w > 0 ? w : 0)));
    found.index.forEach((key, slot) => { result[key] = most > 0 && found.weights[slot] > 0 ? Math.sqrt(found.weights[slot] / most) : 0; });
    return result;
  };

  const middle = (layer, key, at) => {
    const [x, y, width, height] = box(layer, key, at);
    return [x + width / 2, y + height / 2];
  };

  const lines = (context, layer, found, strength, from, at, unit) => {
    const some = found.index.filter((key) => key >= layer.before && strength[key] > 0.004).slice(0, 600);
    context.lineCap = "round";
    for (const key of some.reverse()) {
      const [x, y] = middle(layer, key, at), share = strength[key];
      const bend = [(x + from[0]) / 2 + (y - from[1]) * 0.1, (y + from[1]) / 2 - (x - from[0]) * 0.1];
      context.strokeStyle = ink(0.4 + 0.6 * share, 0.3 + 0.6 * share);
      context.lineWidth = unit * (0.8 + 2.2 * share);
      context.beginPath();
      context.moveTo(...from);
      context.quadraticCurveTo(...bend, x, y);
      context.stroke();
      context.beginPath();
      context.arc(x, y, unit * (1.5 + 2.5 * share), 0, 7);
      context.fillStyle = ink(0.4 + 0.6 * share);
      context.fill();
    }
  };

  const outlines = (context, layer, found, strength, at, unit) => {
    if (found.index.length > 100) return;
    context.lineWidth = unit * 1.2;
    for (const key of found.index.filter((each) => each >= layer.before && strength[each] > 0)) {
      const [x, y, width, height] = box(layer, key, at);
      context.strokeStyle = ink(0.5 + 0.5 * strength[key], 0.95);
      context.strokeRect(x + unit * 0.6, y + unit * 0.6, Math.max(width - unit * 1.2, 1), Math.max(height - unit * 1.2, 1));
    }
  };

  const padding = (context, layer, strength, at) => {
    const [top, left, height, width] = layer.inner;
    for (let key = layer.before; key < layer.keys; key++) {
      const row = Math.floor((key - layer.before) / layer.cells[1]) - top, column = (key - layer.before) % layer.cells[1] - left;
      if (row >= 0 && row < height && column >= 0 && column < width) continue;
      context.fillStyle = strength[key] > 0 ? ink(strength[key]) : "rgb(127 127 140 / .22)";
      const [x, y, wide, high] = box(layer, key, at);
      context.fillRect(x + 0.5, y + 0.5, Math.max(wide - 1, 1), Math.max(high - 1, 1));
    }
  };

  const marker = (context, layer, query, at, unit) => {
    const [x, y, width, height] = box(layer, layer.own(query), at);
    const grow = Math.max(0, 5 * unit - Math.min(width, height) / 2);
    const rect = [x - grow, y - grow, width + 2 * grow, height + 2 * grow];
    for (const [line, pen] of [[4.5, "rgb(0 0 0 / .75)"], [2.2, "#fff"]]) {
      context.lineWidth = unit * line;
      context.strokeStyle = pen;
      context.strokeRect(...rect);
    }
  };

  // Everything; `found` may be null before there is a query.
  const view = (canvas, image, picture, layer, query, found, style, unit) => {
    const context = canvas.getContext("2d"), at = frame(canvas.width, canvas.height, layer);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = !picture.sharp;
    context.imageSmoothingQuality = "high";
    context.drawImage(image, at.left, at.top, at.width, at.height);
    const strength = strengths(layer, found);
    if (style === "lines") {
      context.fillStyle = "rgb(9 10 16 / .5)";
      context.fillRect(at.left, at.top, at.width, at.height);
    } else heat(context, layer, strength, at);
    if (at.band) padding(context, layer, strength, at);
    if (unit && style !== "lines") outlines(context, layer, found, strength, at, unit);
    // Over heat, more lines than these would hide it.
    if (unit && query >= layer.before && (style === "lines" || (style === "both" && found.index.length <= 32)))
      lines(context, layer, found, strength, middle(layer, layer.own(query), at), at, unit);
    if (query >= layer.before) marker(context, layer, query, at, unit || 1);
    return strength;
  };

  // Canvases side by side, for saving.
  const together = (canvases, gap = 16) => {
    const whole = document.createElement("canvas"), context = whole.getContext("2d");
    whole.width = canvases.reduce((sum, each) => sum + each.width, gap * (canvases.length - 1));
    whole.height = Math.max(...canvases.map((each) => each.height));
    canvases.reduce((left, each) => { context.drawImage(each, left, 0); return left + each.width + gap; }, 0);
    return whole;
  };

  return { view, frame, gradient, together };
})();
