"use strict";
// From the text in the page to numbers: half-precision features, and the map a layer's keys are the cells of.
const decode = (() => {
  const bytes = (text) => {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    const letters = atob(text), result = new Uint8Array(letters.length);
    for (let place = 0; place < letters.length; place++) result[place] = letters.charCodeAt(place);
    return result;
  };

  const halves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    halves[bits] = exponent === 31 ? (fraction ? NaN : sign * Infinity)
      : sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
  }

  const blob = (id) => bytes(document.getElementById(id).textContent.trim());
  // The numbers were divided by a power of two where half precision would not hold them.
  const features = (id, exponent) => {
    const raw = blob(id), bits = new Uint16Array(raw.buffer, raw.byteOffset, raw.byteLength / 2), scale = 2 ** exponent;
    return Float32Array.from(bits, (pattern) => halves[pattern] * scale);
  };

  // A layer as the search wants it; its numbers are decoded when it is first looked at.
  const layer = (given) => {
    const { cells, before, rows, columns, ownRows, ownColumns, channels, heads } = given;
    const keys = before + cells[0] * cells[1], count = before + rows.length * columns.length;
    let numbers = null;
    const opened = () => {
      if (!numbers) {
        const key = features(given.key, given.exponent);
        const query = given.query ? features(given.query, given.exponent) : null;
        const part = (array, tokens, head) => array.subarray(head * tokens * channels, (head + 1) * tokens * channels);
        numbers = Array.from({ length: heads }, (_, head) => ({
          key: part(key, keys, head), query: query && part(query, count, head),
        }));
      }
      return numbers;
    };
    const place = (query) => [Math.floor((query - before) / columns.length), (query - before) % columns.length];
    const centre = (query) => {
      if (query < before) return [0, 0];
      const [row, column] = place(query);
      return [rows[row], columns[column]];
    };
    const own = (query) => {
      if (query < before) return query;
      const [row, column] = place(query);
      return before + ownRows[row] * cells[1] + ownColumns[column];
    };
    // The query nearest to a point of the picture, whose sides run from 0 to 1.
    const at = (x, y) => {
      const nearest = (axis, wanted) => axis.reduce((best, here, number) =>
        (Math.abs(here - wanted) < Math.abs(axis[best] - wanted) ? number : best), 0);
      const [top, left, height, width] = given.inner;
      return before + nearest(ownRows, y * height + top - 0.5) * columns.length + nearest(ownColumns, x * width + left - 0.5);
    };
    // The place of a key on the picture, as the corners of its cell; padding lies outside.
    const corners = (key) => {
      const [top, left, height, width] = given.inner, cell = key - before;
      const row = Math.floor(cell / cells[1]) - top, column = cell % cells[1] - left;
      return [column / width, row / height, (column + 1) / width, (row + 1) / height];
    };
    const made = { ...given, keys, count, centre, place, own, at, corners, head: (number) => opened()[number] };
    made.queryRow = (number, query) => {
      const head = made.head(number), start = (head.query ? query : own(query)) * channels;
      return (head.query || head.key).subarray(start, start + channels);
    };
    if (given.mask) {
      let allowed = null;
      made.ownMask = (i, j) => {
        allowed ||= blob(given.mask);
        const bit = i * keys + j;
        return (allowed[bit >> 3] >> (7 - (bit & 7))) & 1;
      };
    }
    made.ownCandidates = given.candidates || null;
    return made;
  };

  return { layer };
})();
