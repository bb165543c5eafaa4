"""Keys that are searched in parts: what the parts bring together is what one search finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.functional import convnn, nearest
from convnn.masks import causal, strided, window
from tests.triton.runner import DEVICE, Case, assert_agrees

KEYS = 800
OPTIONS: list[dict[str, Any]] = [
    {},
    {"similarity": "euclidean"},
    {"mask": causal},
    {"mask": window(200)},
    {"mask": torch.arange(KEYS) % 7 != 1},
    {"mask": strided(11)},
    {"mask": torch.randn(9, KEYS, generator=torch.Generator().manual_seed(3))},
    {"self_index": 70 * torch.arange(9)},
]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cut keys as if these were many, and tell into how many parts."""
    from convnn.backends.triton import sizes, split  # noqa: PLC0415

    seen: list[int] = []
    select = split.select

    def watched(search: Any, count: int, *given: Any, **told: Any) -> None:
        seen.append(count)
        select(search, count, *given, **told)

    # Two parts that are searched together and stream, and the rest, which is held as a whole.
    monkeypatch.setattr(sizes, "PART", 266)
    monkeypatch.setattr(split, "STEP", 128)
    monkeypatch.setattr(split, "select", watched)
    return seen


@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_parts_find_what_the_reference_finds(number: int, parts: list[int]) -> None:
    options, dtype = OPTIONS[number], (torch.float32, torch.bfloat16)[number % 2]
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    assert_agrees(Case("", (9, KEYS, 12, 7), k=5, lead=(2,), dtype=dtype, options=options))
    assert parts == [3]


def test_half_types_rank_by_cosine_in_parts(parts: list[int]) -> None:
    case = Case("", (9, KEYS, 12, 7), k=5, lead=(2, 1), dtype=torch.float16, options={"similarity": "cosine"})
    assert_agrees(case)
    assert parts == [3]


def test_fewer_keys_than_neighbours_leave_slots_empty(parts: list[int]) -> None:
    query, key, *_ = Case("", (3, KEYS, 12, 7), lead=()).leaves()
    mask = torch.zeros(KEYS, device=DEVICE).bool()
    mask[[4, 500, 799]] = True
    found = nearest(query, key, k=5, mask=mask, backend="triton")
    assert parts == [3]
    assert found.index.sort(dim=-1).values.tolist() == [[-1, -1, 4, 500, 799]] * 3
    assert torch.equal(found.scores.isinf(), found.index < 0)


def test_a_nan_in_one_part_comes_first(parts: list[int]) -> None:
    query, key, value, kernel = Case("", (3, KEYS, 12, 7), lead=(2,)).leaves()
    key[1, 600] = torch.nan
    lost = convnn(query, key, value, kernel, k=5, backend="triton").isnan()
    assert parts == [3]
    assert lost[1].all()
    assert not lost[0].any()


@pytest.mark.parametrize("mask", [None, window(790)], ids=["together", "one by one"])
def test_ones_own_key_is_chosen_once_whichever_part_it_is_in(mask: Any, parts: list[int]) -> None:
    query, key, *_ = Case("", (9, KEYS, 12, 7), lead=(2,)).leaves()
    own = 95 * torch.arange(9, device=DEVICE)
    key[:, own] = 3 * query  # nobody is nearer
    found = nearest(query, key, k=5, self_index=own, mask=mask, backend="triton")
    theirs = nearest(query.double(), key.double(), k=5, self_index=own, mask=mask, backend="reference")
    assert parts == [3]
    assert torch.equal(found.index, theirs.index)
    assert (found.index == own[:, None]).sum() == 18
