"""Slots in pieces, lists of slots of any length, and scores that gave up digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convnn.functional import convnn
from tests.triton.runner import DEVICE, Case, assert_agrees, step


@pytest.mark.parametrize("k", [1, 2, 3, 7, 9, 13, 25, 31, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_slots(k: int, dtype: torch.dtype) -> None:
    assert_agrees(Case("slots", (11, 70, 20, 18), k=k, dtype=dtype, lead=()))


def test_slots_and_channels_that_no_row_holds() -> None:
    assert_agrees(Case("wide", (9, 71, 70, 520), k=17, lead=()))


@pytest.mark.parametrize(
    ("keys", "short", "long"),
    [(300, 64, 1024), (300, 16, 1024), (300, 16, 32), (70, 64, 1024)],
    ids=["kept", "sorted", "searched for", "as bits"],
)
def test_keys_chosen_by_many(keys: int, short: int, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from convnn.backends.triton import backward  # noqa: PLC0415

    monkeypatch.setattr(backward, "SHORT", short)
    monkeypatch.setattr(backward, "LONG", long)
    case = Case("hubs", (45, keys, 12, 6), k=5, lead=(2,))
    leaves = case.leaves()
    leaves[0] = leaves[0].abs()
    # Some are chosen by everybody, some often, some never.
    leaves[1] = leaves[1] + torch.tensor([3.0] * 3 + [0.0] * 20 + [-3.0] * (keys - 23), device=DEVICE)[:, None]
    assert_agrees(case, leaves)
    first, second = (step(leaves, case.k, {}, "triton") for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("size", [0.5, 200.0], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_types_do_not_depend_on_lost_digits(size: float, dtype: torch.dtype) -> None:
    """One value per key: the output is the weights, which large scores that lost digits would change."""
    generator = torch.Generator().manual_seed(0)
    query = (torch.randn(40, 16, generator=generator) * size).to(DEVICE, dtype)
    key = torch.randn(70, 16, generator=generator).to(DEVICE, dtype)
    value = torch.eye(70, device=DEVICE, dtype=dtype)
    options: Any = {"k": 6, "similarity": "dot"}
    ours = convnn(query, key, value, backend="triton", **options).double()
    theirs = convnn(query.double(), key.double(), value.double(), backend="reference", **options)
    rounding = 2.0 ** -(7 if dtype == torch.bfloat16 else 11)  # towards zero, where kernels are interpreted
    torch.testing.assert_close(ours, theirs, rtol=1.3 * rounding, atol=1e-5)


def test_no_program_that_orders_slots_has_more_warps_than_a_device_takes() -> None:
    from convnn.backends.triton.sizes import INVERTED, invert_tile  # noqa: PLC0415

    for slots in range(1, INVERTED + 1, 7):
        block, warps = invert_tile(slots)
        assert block >= slots
        assert 1 <= warps <= 32
        assert warps & (warps - 1) == 0
