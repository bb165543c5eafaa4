"use strict";
// The neighbours of one query, in double precision, step by step as the library's reference backend defines them.
// A layer comes decoded (decode.js); settings are plain values. Larger is nearer; -Infinity forbids.
const search = (() => {
  // ---- whole numbers drawn from whole numbers (convnn/hashing.py) ----

  const mixed = (number) => {
    for (let round = 0; round < 2; round++) {
      // Of a number of 33 bits, the highest comes down with the shift.
      const folded = (number >>> 0) ^ Math.floor(number / 65536);
      number = Math.imul(folded, 0x45d9f3b) >>> 0;
    }
    return (number ^ (number >>> 16)) >>> 0;
  };
  const drawn = (number, seed) => mixed(number + mixed(seed % 4294967296));

  // ---- among whom (convnn/candidates.py) ----

  let last = { said: "", index: null };
  const random = (keys, count, seed) => {
    const said = [keys, count, seed].join();
    if (last.said === said) return last.index;
    const ranks = Array.from({ length: keys }, (_, number) => drawn(number, seed));
    const order = Array.from(ranks.keys()).sort((one, other) => ranks[one] - ranks[other] || one - other);
    last = { said, index: order.slice(0, count).sort((one, other) => one - other) };
    return last.index;
  };

  // torch.linspace in single precision: from the start in the first half, from the end in the second, rounded once.
  const places = (side, steps) => {
    if (side <= steps) return Array.from({ length: side }, (_, place) => place);
    if (steps === 1) return [0];
    const step = Math.fround((side - 1) / (steps - 1));
    return Array.from({ length: steps }, (_, place) => Math.trunc(place < Math.floor(steps / 2)
      ? Math.fround(step * place)
      : Math.fround(side - 1 - step * (steps - 1 - place))));
  };

  // On a map a square grid; behind class tokens the tokens are a sequence, as they are to an attention layer.
  const grid = (layer, count) => {
    if (count >= layer.keys) return null;
    if (layer.before) return places(layer.keys, count);
    const steps = Math.round(Math.sqrt(count));
    const [rows, columns] = layer.cells.map((side) => places(side, steps));
    return rows.flatMap((row) => columns.map((column) => row * layer.cells[1] + column));
  };

  const candidates = (layer, head, s) => {
    if (s.candidates === "random") return s.count < layer.keys ? random(layer.keys, s.count, s.seed) : null;
    if (s.candidates === "grid") return grid(layer, s.count);
    if (s.candidates === "own") return layer.ownCandidates ? layer.ownCandidates[head % layer.ownCandidates.length] : null;
    return null;
  };

  // ---- who may be chosen (convnn/masks.py) ----

  const rules = {
    none: () => () => true,
    causal: () => (i, j) => j <= i,
    window: (s) => (i, j) => Math.abs(i - j) <= s.radius,
    bigbird: (s, layer) => (i, j) => {
      if (Math.abs(i - j) <= s.radius || i < s.globals || j < s.globals) return true;
      for (let number = 0; number < s.random; number++)
        if (drawn(i, number + 7919 * s.maskSeed) % layer.keys === j) return true;
      return false;
    },
    own: (s, layer) => (i, j) => !layer.ownMask || layer.ownMask(i, j),
  };

  // ---- how near (convnn/similarity.py) ----

  // What becomes of a query once, and its score with the key whose channels begin at a place; `of` has means and inverse
  // lengths of all keys, for those who ask for lengths.
  const product = (q, keys, at, size) => {
    let sum = 0;
    for (let e = 0; e < size; e++) sum += q[e] * keys[at + e];
    return sum;
  };
  const features = {
    dot: { prepare: (q) => q, score: product },
    scaled_dot: { prepare: (q) => q.map((x) => x * q.length ** -0.5), score: product },
    cosine: {
      lengths: true,
      prepare: (q) => unit(q),
      score: (q, keys, at, size, j, of) => product(q, keys, at, size) * of.inverse[j],
    },
    pearson: {
      lengths: true,
      centred: true,
      prepare: (q) => unit(centred(q)),
      score: (q, keys, at, size, j, of) => {
        let sum = 0;
        for (let e = 0; e < size; e++) sum += q[e] * (keys[at + e] - of.mean[j]);
        return sum * of.inverse[j];
      },
    },
    sqeuclidean: { prepare: (q) => q, score: (q, keys, at, size) => {
      let sum = 0;
      for (let e = 0; e < size; e++) { const d = q[e] - keys[at + e]; sum += d * d; }
      return -sum;
    } },
    euclidean: { prepare: (q) => q, score: (...given) => -Math.sqrt(-features.sqeuclidean.score(...given)) },
    manhattan: { prepare: (q) => q, score: (q, keys, at, size) => {
      let sum = 0;
      for (let e = 0; e < size; e++) sum += Math.abs(q[e] - keys[at + e]);
      return -sum;
    } },
    chebyshev: { prepare: (q) => q, score: (q, keys, at, size) => {
      let most = 0;
      for (let e = 0; e < size; e++) { const d = Math.abs(q[e] - keys[at + e]); if (!(d <= most)) most = d; }
      return -most;
    } },
  };

  const centred = (vector) => {
    const mean = vector.reduce((sum, x) => sum + x, 0) / vector.length;
    return vector.map((x) => x - mean);
  };
  const unit = (vector) => {
    const length = Math.sqrt(vector.reduce((sum, x) => sum + x * x, 0));
    return length === 0 ? vector.map(() => 0) : vector.map((x) => x / length);
  };

  // Means and lengths of a head's keys, once for all queries.
  const known = (head, keys, size, centre) => {
    const name = centre ? "knownCentred" : "known";
    if (head[name]) return head[name];
    const of = { mean: new Float64Array(keys), inverse: new Float64Array(keys) };
    for (let j = 0; j < keys; j++) {
      let sum = 0, square = 0;
      if (centre) { for (let e = 0; e < size; e++) sum += head.key[j * size + e]; sum /= size; }
      for (let e = 0; e < size; e++) { const x = head.key[j * size + e] - sum; square += x * x; }
      of.mean[j] = sum;
      of.inverse[j] = square === 0 ? 0 : 1 / Math.sqrt(square);
    }
    head[name] = of;
    return of;
  };

  // Of places: a row and a column, in cells.
  const space = {
    chebyshev: (dr, dc) => -Math.max(Math.abs(dr), Math.abs(dc)),
    euclidean: (dr, dc) => -Math.sqrt(dr * dr + dc * dc),
    sqeuclidean: (dr, dc) => -(dr * dr + dc * dc),
    manhattan: (dr, dc) => -(Math.abs(dr) + Math.abs(dc)),
    // A convolution's window (convnn/layers/windows.py): nearer than 1 inside, equals told apart by where they lie.
    window: (dr, dc, layer) => {
      const [height, width] = layer.kernel, [down, across] = layer.dilation;
      const y = dr / (down * height / 2), x = dc / (across * width / 2);
      const straight = (y * y + x * x) / 2, side = y + x * 0.37;
      const apart = straight / (1 + straight) + 0.05 * side / (1 + Math.abs(side));
      return -Math.max(Math.abs(y), Math.abs(x)) - 0.2 / Math.max(height, width) * apart;
    },
  };

  // Scores of the keys `among` (null for all), blended score by score (convnn/blend.py): (1 - b) space + b features.
  const scores = (layer, headNumber, query, among, s) => {
    const head = layer.head(headNumber), size = layer.channels, share = s.share;
    const result = new Float64Array(among ? among.length : layer.keys);
    const kind = features[s.similarity];
    const q = share > 0 ? kind.prepare(Float64Array.from(layer.queryRow(headNumber, query))) : null;
    const of = share > 0 && kind.lengths ? known(head, layer.keys, size, kind.centred) : null;
    const [row, column] = layer.centre(query), nearness = space[s.space];
    for (let place = 0; place < result.length; place++) {
      const j = among ? among[place] : place;
      // Tokens without a place cannot be near in space: a share of it leaves them out.
      if (share < 1 && (j < layer.before || query < layer.before)) { result[place] = -Infinity; continue; }
      const alike = share > 0 ? kind.score(q, head.key, j * size, size, j, of) : 0;
      if (share === 1) { result[place] = alike; continue; }
      const cell = j - layer.before, columns = layer.cells[1];
      const near = nearness(Math.floor(cell / columns) - row, cell % columns - column, layer);
      result[place] = share === 0 ? near : (1 - share) * near + share * alike;
    }
    return result;
  };

  // ---- how much each counts (convnn/weighting.py) ----

  const softmax = (s) => {
    const most = Math.max(...s), powers = s.map((x) => Math.exp(x - most));
    const sum = powers.reduce((total, x) => total + x, 0);
    return powers.map((x) => x / sum);
  };
  const weightings = {
    uniform: (s) => s.map(() => 1),
    softmax,
    softmax_at: (s, settings) => softmax(s.map((x) => x / settings.temperature)),
    softmin: (s) => softmax(s.map((x) => -x)),
    sparsemax: (s) => {
      const most = Math.max(...s), shifted = s.map((x) => x - most), ranked = [...shifted].sort((a, b) => b - a);
      let sum = 0, threshold = 0;
      ranked.forEach((x, place) => {
        sum += x;
        if (1 + (place + 1) * x > sum) threshold = (sum - 1) / (place + 1);
      });
      return shifted.map((x) => Math.max(x - threshold, 0));
    },
  };

  // The most k may be: every key, or every candidate.
  const most = (layer, s) => {
    const among = candidates(layer, 0, s);
    return among ? among.length : layer.keys;
  };

  // ---- the search ----

  const neighbours = (layer, head, query, s) => {
    const among = candidates(layer, head, s), allowed = rules[s.mask](s, layer);
    const own = s.self === "any" ? -1 : layer.own(query);
    const found = scores(layer, head, query, among, s);
    const pairs = [];
    for (let place = 0; place < found.length; place++) {
      const j = among ? among[place] : place;
      if (j !== own && allowed(query, j) && found[place] !== -Infinity) pairs.push([j, found[place]]);
    }
    // Among equals the smaller number comes first; what is not a number comes before all.
    const rank = (score) => (Number.isNaN(score) ? Infinity : score);
    pairs.sort((one, other) => (rank(one[1]) === rank(other[1]) ? one[0] - other[0] : rank(other[1]) - rank(one[1])));
    const limit = s.k === "all" ? Infinity : Math.min(s.k, most(layer, s));
    let chosen = s.k === "all" ? pairs : pairs.slice(0, limit);
    if (own >= 0 && allowed(query, own)) {
      let score = scores(layer, head, query, [own], s)[0];
      if (s.self === "one" && score !== -Infinity && !Number.isNaN(score)) score = 1;
      if (score !== -Infinity) chosen = [[own, score], ...chosen].slice(0, limit);
    }
    const index = chosen.map((pair) => pair[0]), kept = chosen.map((pair) => pair[1]);
    const lost = kept.some(Number.isNaN);
    const weights = kept.length ? weightings[s.weighting](kept, s).map((w) => (lost ? NaN : w)) : [];
    return { index, scores: kept, weights };
  };

  return { neighbours, most, random, places, drawn, similarities: Object.keys(features), weightings: Object.keys(weightings) };
})();
