"""Kernels that mix channels, on the Triton backend: against the reference in float64, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convnn import ConvNN2d
from convnn.backends import reference
from convnn.functional import aggregate, convnn
from convnn.neighbors import Neighbors
from tests.triton.runner import DEVICE, ERROR

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Problem:
    """Sizes, all different, of values, slots and a kernel."""

    name: str
    lead: tuple[int, ...] = (2, 3)
    sizes: tuple[int, int] = (37, 41)  # N, M
    channels: tuple[int, int] = (20, 12)  # C, O
    groups: int = 1
    k: int = 5
    dtype: torch.dtype = SINGLE
    weighted: bool = True
    slots: torch.dtype = torch.int64
    empty: float = 0.2

    def tensors(self) -> tuple[list[Tensor], Tensor]:
        """Value, kernel and weights, if there are any; and the index."""
        generator = torch.Generator().manual_seed(0)
        (n, m), (c, o) = self.sizes, self.channels
        index = torch.randint(m, (*self.lead, n, self.k), generator=generator)
        index = index.masked_fill(torch.rand(index.shape, generator=generator) < self.empty, -1)
        shapes = [(*self.lead, m, c), (o, c // self.groups, self.k)]
        leaves = [torch.randn(shape, generator=generator).to(DEVICE, self.dtype) for shape in shapes]
        leaves += [torch.rand(index.shape, generator=generator).to(DEVICE)] if self.weighted else []
        return leaves, index.to(DEVICE, self.slots)


def step(leaves: list[Tensor], index: Tensor, *, exact: bool = False) -> list[Tensor]:
    """The output, and the gradients of all leaves."""
    from convnn.backends.triton import mixed  # noqa: PLC0415

    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    value, kernel, *weights = leaves
    if exact:
        given = weights[0] if weights else (index >= 0).double()
        output = reference.aggregate(value, index.long(), given, kernel)
    else:
        output = mixed.combine(value, index, weights[0] if weights else None, kernel)
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, leaves, pull)]


def assert_agrees(problem: Problem, leaves: list[Tensor] | None = None) -> None:
    made, index = problem.tensors()
    leaves = made if leaves is None else leaves
    ours = step(leaves, index)
    theirs = step([leaf.double() for leaf in leaves], index, exact=True)
    for number, (mine, exact) in enumerate(zip(ours, theirs, strict=True)):
        error = (mine.double() - exact).norm() / exact.norm().clamp(min=1e-2)
        assert error < ERROR[problem.dtype], f"result {number} is off by {error:.1e}"


PROBLEMS = [
    Problem("standard"),
    Problem("standard, bfloat16", dtype=BRAIN),
    Problem("standard, float16", dtype=HALF, weighted=False),
    Problem("uniform", weighted=False),
    Problem("uniform, bfloat16", dtype=BRAIN, weighted=False, slots=torch.int16),
    Problem("grouped", groups=4),
    Problem("grouped, bfloat16, uniform", dtype=BRAIN, groups=4, weighted=False),
    Problem("more outputs than channels", channels=(3, 70), lead=(4,)),
    Problem("many channels", channels=(150, 9), sizes=(11, 13), lead=(), k=3),
    Problem("many channels, bfloat16", channels=(150, 300), sizes=(11, 13), lead=(), k=3, dtype=BRAIN),
    Problem("few positions of many maps", lead=(70,), sizes=(4, 16), k=9, slots=torch.int32, dtype=BRAIN),
    Problem("depthwise with two outputs of each channel", channels=(6, 12), groups=6),
    Problem("one key", sizes=(7, 1), k=1, empty=0.0),
    Problem("nobody chooses", empty=1.1),
]


@pytest.fixture(params=["ieee", "tf32"])
def rounding(request: pytest.FixtureRequest) -> Iterator[str]:
    """What torch is told about matrix products: with rounding float32 takes the kernel, without torch's products."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_values_and_gradients_agree_with_the_reference(problem: Problem, rounding: str) -> None:
    if DEVICE == "cuda" and rounding == "tf32" and problem.dtype == SINGLE:
        pytest.skip("rounds on a device, as it is told to")
    assert_agrees(problem)


@pytest.mark.parametrize("budget", [1, 8000, 30_000])
@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[5], PROBLEMS[1]], ids=lambda problem: problem.name)
def test_pieces_make_a_whole(problem: Problem, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from convnn.backends.triton import mix_grads, mix_steps  # noqa: PLC0415

    monkeypatch.setattr(mix_steps, "BUDGET", budget)
    monkeypatch.setattr(mix_grads, "taps_tile", lambda *_: None)
    assert_agrees(problem)


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_one_piece_after_the_other_give_the_same_sums(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from convnn.backends.triton import mix_steps  # noqa: PLC0415

    problem = Problem("", (2,), (13, 11), (300, 10), groups, k=3, dtype=BRAIN)
    leaves, index = problem.tensors()
    at_once = step(leaves, index)
    asked: list[int] = []

    def always(_: Tensor, held: int) -> bool:
        asked.append(held)
        return True

    monkeypatch.setattr(mix_steps, "rolled", always)
    assert all(torch.equal(one, other) for one, other in zip(step(leaves, index), at_once, strict=True))
    assert_agrees(problem)
    assert min(asked) > 300 // groups


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_two_runs_are_equal_bit_by_bit(dtype: torch.dtype) -> None:
    leaves, index = Problem("", dtype=dtype).tensors()
    index[..., 0] = 3  # everybody's neighbour
    first, second = step(leaves, index), step(leaves, index)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("keys", [7, 90])
def test_the_slots_of_a_key_are_listed_in_order(keys: int) -> None:
    """However they came: who is first on a device is nobody's choice."""
    from convnn.backends.triton import mix_grads  # noqa: PLC0415
    from convnn.backends.triton.kernels.mix_backward import order_short  # noqa: PLC0415

    index = torch.randint(-1, keys, (1, 2, 60, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    until, ordered = mix_grads.edges_of(index, keys)
    shuffled, again = ordered.clone(), torch.full_like(ordered, -1)
    for entry in range(2):
        slots, first = index[0, entry].flatten(), 0
        for key in range(keys):
            chose, last = (slots == key).nonzero()[:, 0], int(until[entry, key])
            assert torch.equal(ordered[entry, first:last], chose.int())
            shuffled[entry, first:last] = chose.flip(0).roll(1)
            first = last
        again[entry, first:] = ordered[entry, first:]
    order_short[(3, 2)](index, until, shuffled, again, keys, 300, SHORT=64, BLOCK=128)
    assert torch.equal(again, ordered)


@pytest.mark.parametrize("keys", [31, 90, 256, 300])
def test_slots_that_name_no_key_twice_in_a_row_are_listed_alike(keys: int) -> None:
    from convnn.backends.triton import mix_grads  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    index = torch.rand(1, 2, 60, keys, generator=generator).topk(7).indices
    index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.1, -1).to(DEVICE)
    (until, ordered), (upto, alike) = (mix_grads.edges_of(index, keys, distinct=known) for known in (False, True))
    assert torch.equal(until, upto)
    for entry in range(2):
        filled = int(until[entry, -1])
        assert filled == (index[0, entry] >= 0).sum()
        assert torch.equal(ordered[entry, :filled], alike[entry, :filled])


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_ones_own_key_comes_first_and_the_last_gives_way(dtype: torch.dtype) -> None:
    from convnn.backends.triton import ops  # noqa: PLC0415

    index = torch.arange(10, 10 + 2 * 3 * 5 * 4).view(2, 3, 5, 4).to(DEVICE, dtype)
    own = torch.tensor([3, -1, 0, 7, -5], dtype=torch.int32).expand(2, 3, 5).contiguous().to(DEVICE)
    found = ops.own_first(own, index)
    assert found.dtype == dtype
    for row in range(5):
        others = index[:, :, row]
        first = torch.full_like(others[..., :1], int(own[0, 0, row]))
        expected = others if own[0, 0, row] < 0 else torch.cat([first, others[..., :-1]], -1)
        assert torch.equal(found[:, :, row], expected)
    torch.library.opcheck(ops.own_first.overload, (own, index))


@pytest.mark.parametrize("groups", [1, 4])
def test_a_key_named_more_often_than_there_are_rows_sums_all_of_them(groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    index = (torch.rand(300, 5, generator=generator) > 0.85).long().to(DEVICE)
    value, kernel = torch.randn(3, 4, generator=generator), torch.randn(4, 4 // groups, 5, generator=generator)
    pull = torch.randn(300, 4, generator=generator)
    results = []
    for backend, dtype in (("triton", SINGLE), ("reference", torch.float64)):
        leaf = value.to(DEVICE, dtype).requires_grad_()
        found = Neighbors(torch.zeros(300, 5, dtype=dtype, device=DEVICE), index)
        output = aggregate(leaf, found, kernel.to(DEVICE, dtype), weighting="uniform", backend=backend)
        results.append(torch.autograd.grad(output, leaf, pull.to(DEVICE, dtype))[0].double())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_gradients_nobody_asks_for_are_not_computed() -> None:
    from convnn.backends.triton import mix  # noqa: PLC0415

    (value, kernel), index = Problem("", weighted=False, lead=(1, 2)).tensors()
    pull = torch.ones(1, 2, 37, 12, device=DEVICE)
    into = mix.mix_backward(value, index, None, kernel, pull, False, False, False, True)
    assert [part.numel() > 0 for part in into] == [False, False, True]
    whole = mix.mix_backward(value, index, None, kernel, pull, False, True, False, True)
    assert torch.equal(whole[2], into[2])


def test_leading_dimensions_broadcast() -> None:
    (value, kernel, weights), index = Problem("", lead=(3,)).tensors()
    alone = [step([value[:1], kernel, weights[i : i + 1]], index[i : i + 1])[0] for i in range(3)]
    torch.testing.assert_close(step([value[:1], kernel, weights], index)[0], torch.cat(alone))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_nan_reaches_its_rows_and_no_others(similarity: str, groups: int) -> None:
    query, key, value = (torch.randn(2, *shape, device=DEVICE) for shape in ((7, 12), (11, 12), (11, 6)))
    kernel = torch.randn(8, 6 // groups, 3, device=DEVICE)
    query[0, 2, 1] = torch.nan
    options: Any = {"k": 3, "similarity": similarity, "weighting": "uniform"}
    assert torch.equal(
        convnn(query, key, value, kernel, backend="triton", **options).isnan().any(-1).nonzero().cpu(),
        torch.tensor([[0, 2]]),
    )
    key[1, 4, 0] = torch.nan
    ours, theirs = (convnn(query, key, value, kernel, backend=b, **options).isnan() for b in ("triton", "reference"))
    assert torch.equal(ours, theirs)
    mask = torch.zeros(7, 11, device=DEVICE).bool()
    mask[3:, 5:] = True
    output = convnn(query, key, value, kernel, mask=mask, backend="triton", **options)
    assert (output[:, :3] == 0).all()
    assert output.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"stride": 2}, {"include_padding": False}, {"k": 4}], ids=str)
def test_a_layer_on_maps_agrees_with_the_reference(options: dict[str, Any]) -> None:
    x = torch.randn(3, 4, 5, 6, device=DEVICE)
    layer = ConvNN2d(4, 10, 3, padding=1, similarity="cosine", device=DEVICE, backend="triton", **options)
    exact = ConvNN2d(4, 10, 3, padding=1, similarity="cosine", device=DEVICE, backend="reference", **options).double()
    exact.load_state_dict(layer.state_dict())
    results = []
    for each, cells in ((layer, x.clone().requires_grad_()), (exact, x.double().requires_grad_())):
        output = each(cells)
        results.append([output, *torch.autograd.grad(output.square().sum(), [cells, *each.parameters()])])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_directions_are_the_definition() -> None:
    from convnn.backends.triton import mix  # noqa: PLC0415
    from convnn.similarity import unit  # noqa: PLC0415

    rows = torch.randn(2, 9, 7, device=DEVICE)
    rows[0, 3], rows[1, 2], rows[1, 4], rows[0, 1, 5] = 0.0, 1e-30, 1e30, torch.nan
    for given in (rows, rows.mT.contiguous().mT, rows[0], rows.bfloat16()):
        scaled, lost = mix.directions(given)
        torch.testing.assert_close(scaled, unit(given.float()), equal_nan=True)
        assert torch.equal(lost.isnan(), given.isnan().any(-1))
        assert (lost[~lost.isnan()] == 0).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_accepts_the_operators() -> None:
    from convnn.backends.triton import mix  # noqa: PLC0415

    for problem in (Problem("", lead=(1, 2)), Problem("", lead=(1, 2), weighted=False, groups=2, dtype=BRAIN)):
        (value, kernel, *weights), index = problem.tensors()
        for leaf in (value, kernel, *weights):
            leaf.requires_grad_()
        marks = torch.zeros(1, 2, 37, device=DEVICE), torch.zeros(1, 2, 41, device=DEVICE)
        for lost in (marks, (None, None)):
            given = (value, index, weights[0] if weights else None, kernel, *lost, False)
            torch.library.opcheck(mix.mix.overload, given)
    torch.library.opcheck(mix.directions.overload, (torch.randn(2, 9, 7, device=DEVICE),))


def test_it_compiles_without_a_break() -> None:
    leaves, _ = replace(PROBLEMS[0], lead=(2,)).tensors()
    query, key = torch.randn(2, 37, 6, device=DEVICE), torch.randn(2, 41, 6, device=DEVICE)
    value, kernel = (leaf.requires_grad_() for leaf in leaves[:2])

    def run(value: Tensor, kernel: Tensor) -> Tensor:
        return convnn(
            query, key, value, kernel, k=5, similarity="cosine", weighting="uniform",
            self_index=torch.arange(37, device=DEVICE), backend="triton",
        )  # fmt: skip

    ours, theirs = torch.compile(run, fullgraph=True, backend="aot_eager")(value, kernel), run(value, kernel)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), (value, kernel)) for each in (ours, theirs)))
