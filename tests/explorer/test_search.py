"""The neighbours the page's script finds are those of the library's reference, on the same numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from convnn.candidates import Cells, grid
from convnn.hashing import drawn, mixed
from convnn.masks import bigbird
from convnn.similarity import SIMILARITIES
from convnn.weighting import WEIGHTINGS
from convnn_lab.explorer.layer import Choices, Layer, found
from tests.explorer import samples

OFFERED: dict[str, tuple[Any, ...]] = {
    "similarity": tuple(SIMILARITIES),
    "share": (0.0, 0.37, 1.0),
    "candidates": ("all", "random", "grid", "own"),
    "mask": ("none", "causal", "window", "bigbird", "own"),
    "self": ("any", "first", "one"),
}
ALONGSIDE: dict[str, tuple[Any, ...]] = {
    "weighting": (*WEIGHTINGS, "softmax_at"),
    "space": ("chebyshev", "euclidean", "sqeuclidean", "manhattan", "window"),
    "k": (1, 4, 4, 9, 9, "all"),
    "seed": (0, 3, 4_000_000_000),
    "temperature": (0.3, 2.0),
    "radius": (2, 7),
    "mask_seed": (0, 5),
    "random": (0, 2),
}
RUN = """([layer, all, queries]) => all.map((s) => queries.map((query) => {
  const seen = explorer.layer(0, 0, layer);
  return Array.from({length: seen.heads}, (_, head) => search.neighbours(seen, head, query, s));
}))"""


def cases(layer: Layer, seed: int) -> list[Choices]:
    """One in three of all combinations of what is offered, with the rest drawn."""
    draw = random.Random(seed)
    listed = []
    for values in itertools.product(*OFFERED.values()):
        if draw.random() > 1 / 3:
            continue
        beside = {name: draw.choice(options) for name, options in ALONGSIDE.items()}
        if layer.map.kernel is None and beside["space"] == "window":
            beside["space"] = "chebyshev"
        listed.append(Choices(**dict(zip(OFFERED, values, strict=True)), **beside, count=draw.choice((9, 16))))
    return listed


def compare(seen: dict[str, Any], index: Any, scores: Any, weights: Any) -> None:
    filled = index >= 0
    expected = (index[filled], scores[filled], weights[filled])
    ours = [np.array(seen[part]) for part in ("index", "scores", "weights")]
    assert len(ours[0]) == len(expected[0])
    assert np.allclose(ours[1], expected[1], rtol=1e-9, atol=1e-12)
    assert np.allclose(ours[2], expected[2], rtol=1e-8, atol=1e-10)
    for slot in np.flatnonzero(ours[0] != expected[0]):
        # Two keys may change places only where rounding alone tells their scores apart.
        near = np.abs(expected[1] - expected[1][slot]) <= 1e-12 * np.abs(expected[1]).max()
        assert near.sum() > 1 or slot == len(expected[0]) - 1, (slot, ours, expected)


@pytest.mark.parametrize("make", [samples.tokens, samples.padded, samples.strided])
def test_the_page_finds_what_the_library_finds(make: Callable[[], Layer], open_page: Callable[..., Any]) -> None:
    layer = make()
    page = open_page(samples.text(layer))
    count = layer.map.queries
    queries = sorted({0, 1, count // 2, count - 1})
    all_cases = cases(layer, seed=count)
    seen = page.evaluate(RUN, [0, [each.as_page() for each in all_cases], queries])
    exact = layer.rounded()
    reached = set()
    for choices, told in zip(all_cases, seen, strict=True):
        near, weights = found(exact, choices)
        reached.add(bool((near.index < 0).any()))
        whole = [part[:, queries].numpy() for part in (near.index, near.scores, weights)]
        for head, place in itertools.product(range(layer.heads), range(len(queries))):
            compare(told[place][head], *(part[head, place] for part in whole))
    assert reached == {True, False}  # some rows are full, some are not


def test_the_settings_of_the_page_are_those_of_the_choices() -> None:
    named = {field.name for field in fields(Choices)}
    assert named == set(OFFERED) | set(ALONGSIDE) | {"count", "globals"}


def test_whole_numbers_are_drawn_as_the_library_draws_them(open_page: Callable[..., Any]) -> None:
    page = open_page(samples.text(samples.padded()))
    # A seed whose hash is so large that adding a number leaves 32 bits.
    carries = int(mixed(torch.arange(10**6)).argmax())
    assert mixed(torch.tensor(carries)) + 65536 >= 2**32
    numbers, seeds = [0, 1, 77, 3135, 65536], [0, 1, 7919, 2**31, 2**32 - 1, carries]
    seen = page.evaluate("([n, s]) => s.map((seed) => n.map((number) => search.drawn(number, seed)))", [numbers, seeds])
    for seed, row in zip(seeds, seen, strict=True):
        assert row == drawn(torch.tensor(numbers), seed).tolist()


def test_grids_stand_where_the_library_puts_them(open_page: Callable[..., Any]) -> None:
    page = open_page(samples.text(samples.padded()))
    pairs = [(side, steps) for side in (*range(2, 66), 112, 197, 224) for steps in range(1, min(side, 40))]
    seen = page.evaluate("(pairs) => pairs.map(([side, steps]) => search.places(side, steps))", pairs)
    for (side, steps), places in zip(pairs, seen, strict=True):
        expected = grid(steps)(torch.Size(()), Cells((side,)), torch.device("cpu"))
        assert expected is not None
        assert places == expected.tolist(), (side, steps)


def test_numbers_beyond_half_precision_come_through() -> None:
    layer = samples.padded()
    for scale in (1e-7, 1.0, 3e6):
        scaled = replace(layer, key=layer.key * scale)
        torch.testing.assert_close(scaled.rounded().key, scaled.key.double(), rtol=2**-10, atol=scale * 1e-6)


def test_bigbird_numbers_keys_as_the_mask_does() -> None:
    layer, choices = samples.padded(), Choices(mask="bigbird", radius=2, random=2, mask_seed=5, k="all", share=1.0)
    near, _ = found(layer, choices)
    rule = bigbird(2, choices.globals, 2, keys=layer.map.keys, seed=5)
    allowed = rule(torch.arange(layer.map.queries)[:, None], torch.arange(layer.map.keys)[None])
    assert (near.index[0] >= 0).sum(-1).tolist() == allowed.sum(-1).tolist()
