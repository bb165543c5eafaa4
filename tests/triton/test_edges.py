"""What the kernels could get wrong: ties, NaN, extremes, hubs, randomness, and what torch asks of an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import convnn
from convnn.backends.triton import gates, with_order
from convnn.functional import aggregate, nearest
from convnn.functional import convnn as operator
from tests.triton.runner import DEVICE, Case, assert_agrees, one_bin, step


def scores_of(query: Tensor, key: Tensor, index: Tensor) -> Tensor:
    return (query.double() @ key.double().mT).gather(-1, index.clamp(min=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [50, 290])
@pytest.mark.parametrize("number", [0.0, 1.0, -1.0])
def test_equal_keys_are_chosen_once_each(number: float, m: int, dtype: torch.dtype) -> None:
    query = torch.ones(9, 16, dtype=dtype, device=DEVICE)
    found = nearest(query, torch.full((m, 16), number, dtype=dtype, device=DEVICE), k=7, backend="triton")
    assert (found.index >= 0).all()
    assert all(len(set(row)) == 7 for row in found.index.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bins", [32, 64, 128])
def test_more_of_one_bin_than_it_holds_are_found(bins: int, dtype: torch.dtype) -> None:
    best = one_bin(9 * bins, bins)
    key = torch.rand(9 * bins, 16) * 0.1
    key[best] += torch.arange(1.0, 10.0)[:, None]
    query, key = (torch.rand(5, 16) + 0.5).to(DEVICE, dtype), key.to(DEVICE, dtype)
    index = nearest(query, key, k=9, similarity="dot", backend="triton").index
    assert index.tolist() == [best.flip(0).tolist()] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [1, -1])
def test_sorted_and_periodic_keys_are_found(order: int, dtype: torch.dtype) -> None:
    query = torch.rand(20, 16, device=DEVICE).to(dtype)
    ramp = torch.arange(300, device=DEVICE) * order % 300
    for spread in (ramp, ramp % 64, ramp // 64):
        key = (torch.rand(300, 16, device=DEVICE) * 0.01 + spread[:, None] / 300).to(dtype)
        index = nearest(query, key, k=9, similarity="dot", backend="triton").index
        best = (query.double() @ key.double().mT).topk(9).values
        chosen = scores_of(query, key, index).sort(-1, descending=True).values
        assert ((best - chosen) <= 2**-15 * best.abs()).all()
        assert all(len(set(row)) == 9 for row in index.tolist())


def test_a_key_everybody_chooses_sums_all_of_them() -> None:
    case = Case("hub", (150, 160, 12, 6), k=4, lead=())
    query, key, value, kernel = case.leaves()
    key[3], key[7] = 3.0, 2.5
    assert_agrees(case, [query.abs(), key, value, kernel])


@pytest.mark.parametrize("weighting", ["softmax", "uniform"])
@pytest.mark.parametrize("m", [11, 280])
def test_a_nan_reaches_its_rows_and_no_others(m: int, weighting: str) -> None:
    query, key, value = (torch.randn(2, *shape, device=DEVICE) for shape in ((7, 12), (m, 12), (m, 6)))
    query[0, 2, 1] = torch.nan
    key[1, 4, 0] = torch.nan
    mask = torch.ones(7, m, device=DEVICE).bool()
    mask[3:, 4] = False
    rows = torch.zeros(2, 7, device=DEVICE).bool()
    rows[0, 2], rows[1, :3] = True, True
    output = operator(query, key, value, k=5, mask=mask, weighting=weighting, backend="triton")
    assert torch.equal(output.isnan().any(-1), rows)
    padding = torch.arange(m, device=DEVICE) != 4
    output = operator(query, key, value, k=5, mask=padding[None], weighting=weighting, backend="triton")
    assert output.isnan().any(-1).sum() == 1


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("size", [1e-30, 1e15, 1e30])
def test_extremes_choose_what_the_reference_chooses(size: float) -> None:
    query, key = torch.randn(9, 16, device=DEVICE) * size, torch.randn(280, 16, device=DEVICE)
    ours, theirs = (
        nearest(query, key, k=5, similarity="dot", backend=backend).index for backend in ("triton", "reference")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_infinite_scores_come_first() -> None:
    query, key = torch.full((3, 16), 1e30, device=DEVICE), torch.randn(280, 16, device=DEVICE)
    key[[5, 200]] = 1e30
    index = nearest(query, key, k=3, similarity="dot", backend="triton").index
    assert {5, 200} <= set(index[0].tolist())


def test_empty_slots_weigh_nothing() -> None:
    x = torch.randn(6, 12, device=DEVICE, requires_grad=True)
    mask = torch.zeros(6, 6, device=DEVICE).bool()
    mask[1:, 2] = True
    output, found = operator(x, x, x, k=3, mask=mask, weighting="uniform", backend="triton", return_neighbors=True)
    assert found.index[:, 1:].eq(-1).all()
    assert found.index[0].eq(-1).all()
    torch.testing.assert_close(output[1:], x[2].expand(5, -1))
    whole = operator(x, x, x, k=3, mask=mask, weighting="uniform", backend="triton")
    torch.testing.assert_close(whole, output)


def test_dropout_is_the_same_in_forward_and_backward() -> None:
    query, key = torch.randn(60, 12, device=DEVICE), torch.randn(11, 12, device=DEVICE)
    value = torch.eye(11, device=DEVICE, requires_grad=True)
    for weighting in ("softmax", "uniform"):
        output = operator(query, key, value, k=5, weighting=weighting, dropout_p=0.5, backend="triton")
        (gradient,) = torch.autograd.grad(output.sum(), value)
        torch.testing.assert_close(gradient[:, 0], output.sum(0))
        assert 0.3 < (output > 0).sum().item() / 300 < 0.7


def test_two_runs_are_equal_bit_by_bit() -> None:
    case = Case("twice", (90, 100, 12, 6), k=9)
    first, second = (step(case.leaves(), 9, {}, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("similarity", ["scaled_dot", "euclidean"])
@pytest.mark.parametrize("weighting", ["softmax", "uniform", "sparsemax"])
def test_sums_in_any_order_are_the_same_but_for_rounding(weighting: str, similarity: str) -> None:
    leaves = Case("any order", (20, 30, 12, 6), k=4).leaves()
    options: Any = {"weighting": weighting, "similarity": similarity}
    ours = step(leaves, 4, options, with_order(fixed=False))
    torch.testing.assert_close(ours, step(leaves, 4, options, "triton"), rtol=1e-4, atol=1e-5)


def test_the_halves_make_the_whole() -> None:
    query, key, value, kernel = Case("halves", (30, 40, 12, 6), k=4).leaves()
    found = nearest(query, key, k=4, backend="triton")
    torch.testing.assert_close(
        aggregate(value, found, kernel, backend="triton"), operator(query, key, value, kernel, k=4, backend="triton")
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_accepts_the_operators() -> None:
    from convnn.backends.triton import ops  # noqa: PLC0415

    query, key, value, taps = (
        torch.randn(shape, device=DEVICE) for shape in ((1, 2, 9, 8), (1, 2, 11, 8), (1, 2, 11, 6), (3, 6))
    )
    searched: Any = (query, key, *(None,) * 5, 3, 0, False, -1, False, 0)
    torch.library.opcheck(ops.select.overload, searched)
    index, scores = ops.select(*searched)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, taps)]
    numbers = (0, 1, True, 0.3, 0.0, 0.0, False, True)
    torch.library.opcheck(ops.combine.overload, (*leaves, index, *(None,) * 5, None, *numbers))
    torch.library.opcheck(ops.combine.overload, (*leaves, index, *(None,) * 5, scores, *numbers))


def test_it_compiles_without_a_break() -> None:
    case = Case("compiled", (20, 30, 12, 6), k=4)
    leaves: Any = [leaf.requires_grad_() for leaf in case.leaves()]

    def run(*tensors: Tensor) -> Tensor:
        return operator(*tensors, k=4, mask="causal", backend="triton")

    ours, theirs = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves), rtol=1e-4, atol=1e-5
    )


def test_it_says_why_not() -> None:
    x = torch.randn(5, 4, device=DEVICE, dtype=torch.float64)
    with pytest.raises(ValueError, match="compute in float32"):
        operator(x, x, x, k=2, backend="triton")
    far = torch.empty(1, 4, device=DEVICE).expand(2**29, 4)
    with pytest.raises(ValueError, match="count up to 2,147,483,647"):
        nearest(far, far[:3], k=2, backend="triton")
    assert convnn.backends.choose("triton", None, x.float()).name == "triton"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_missing_triton_is_said(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Tensor:
        return operator(x, x, x, k=2, backend="triton")

    monkeypatch.setattr(gates, "find_spec", lambda name: None)  # noqa: ARG005
    gates._missing.cache_clear()
    try:
        with pytest.raises(Exception, match="Triton is not installed"):
            (torch.compile(run, fullgraph=True, backend="eager") if compiled else run)(torch.randn(5, 4, device=DEVICE))
    finally:
        gates._missing.cache_clear()


def test_auto_never_interprets() -> None:
    x = torch.randn(5, 4)
    assert convnn.explain(x, x, x, k=2).name == "chunked"


def agree(ours: Any, theirs: Any, error: float) -> None:
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.double() - exact).norm() <= error * exact.norm().clamp(min=1e-6)


@pytest.mark.parametrize("similarity", ["sqeuclidean", "euclidean"])
@pytest.mark.parametrize("keys", [40, 300])
def test_distances_are_taken_to_the_candidates_themselves(similarity: str, keys: int) -> None:
    leaves = Case("", (6, keys, 12, 5), k=4, lead=()).leaves()
    options = {"similarity": similarity, "candidates": torch.arange(1, keys, 2, device=DEVICE)}
    agree(step(leaves, 4, options, "triton"), step([x.double() for x in leaves], 4, options, "reference"), 1e-4)


def test_a_mask_of_one_column_speaks_for_all_keys() -> None:
    leaves = Case("", (6, 40, 12, 5), k=4).leaves()
    for mask in (torch.tensor([[[True]], [[False]]]), torch.tensor(True)):
        options = {"mask": mask.to(DEVICE)}
        agree(step(leaves, 4, options, "triton"), step([x.double() for x in leaves], 4, options, "reference"), 1e-4)


@pytest.mark.parametrize("k", [4, 20])
def test_large_scores_of_half_types_train_as_they_choose(k: int) -> None:
    query, key, value = Case("", (12, 40, 64, 5), lead=(), kernel=False).leaves()
    key = 4 * (key[:1] + 0.02 * key)  # scores of hundreds, which differ by little
    leaves = [x.bfloat16() for x in (8 * query, key, value)]
    ours = step(leaves, k, {"similarity": "dot"}, "triton")
    theirs = step([x.double() for x in leaves], k, {"similarity": "dot"}, "reference")
    agree(ours, theirs, 3e-2)


def test_distances_far_from_the_origin_keep_their_gradients() -> None:
    leaves = Case("", (12, 40, 3, 5), k=4, lead=()).leaves()
    leaves = [x + 1e4 if number < 2 else x for number, x in enumerate(leaves)]
    options = {"similarity": "sqeuclidean"}
    agree(step(leaves, 4, options, "triton"), step([x.double() for x in leaves], 4, options, "reference"), 1e-4)


def test_a_nan_nobody_chose_is_not_seen_by_a_uniform_weighting() -> None:
    query, key, value = Case("", (3, 12, 6, 4), lead=(), kernel=False).leaves()
    key[0], query[2] = torch.nan, torch.nan
    mask = torch.zeros(3, 12, dtype=torch.bool, device=DEVICE)
    mask[0, 3:5] = mask[1, 1:] = True
    kernel = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    given: Any = {"k": 5, "mask": mask, "weighting": "uniform"}
    ours = operator(query, key, value, kernel, **given, backend="triton")
    torch.testing.assert_close(ours, operator(query, key, value, kernel, **given, backend="reference"))


@pytest.mark.parametrize(("keys", "channels"), [(40, 12), (100, 70), (300, 70), (300, 3)])
def test_tf32_is_read_in_either_of_torchs_ways(keys: int, channels: int) -> None:
    leaves, matmul = Case("", (6, keys, channels, 5), k=4, lead=()).leaves(), torch.backends.cuda.matmul
    options = {"similarity": "euclidean"} if channels == 3 else {}
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        ours = step(leaves, 4, options, "triton")
    finally:
        matmul.fp32_precision = before
    agree(ours, step([x.double() for x in leaves], 4, options, "reference"), 1e-2)


def test_no_queries_beside_a_rule() -> None:
    query, key, value = torch.empty(0, 6, device=DEVICE), torch.randn(9, 6).to(DEVICE), torch.randn(9, 4).to(DEVICE)
    assert operator(query, key, value, k=3, mask=lambda i, j: j <= i, backend="triton").shape == (0, 4)
