"""The benchmarks of maps and of many keys, without a device to measure on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from convnn import ConvNN2d, HybridConv2d, functional
from convnn.functional import convnn
from convnn_lab.bench import check as checking
from convnn_lab.bench import conv, long, maps, plain
from convnn_lab.bench.check import check, gathered

CASE = conv.Case(3, 7, 8, 12, k=5)
BRAIN, SINGLE = torch.bfloat16, torch.float32
LONG = [long.Case(2, 37, 53, 8, 5), long.Case(2, 41, 41, 8, 5, is_causal=True), long.Case(2, 41, 41, 8, 5, True, 9)]


def some_maps(dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(CASE.batch, CASE.inputs, CASE.side, CASE.side, dtype=dtype)


def test_operators_on_maps_compute_what_their_names_say() -> None:
    found = {each.name: each for each in conv.contenders(CASE, some_maps())}
    assert next(iter(found)) == "conv2d"
    for weighting in conv.WEIGHTINGS:
        cells, kernel = found[f"convnn, {weighting}"].inputs
        exact = (cells.double(), cells.double(), cells.double(), kernel.double())
        expected = convnn(*exact, k=5, similarity="cosine", weighting=weighting, backend="reference")
        for name in conv.OPERATORS:
            each = found[f"{name}, {weighting}"]
            output = each.function(*each.inputs).double()
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            assert each.peer == (name != "convnn")


def test_layers_on_maps_compute_what_their_names_say() -> None:
    x = some_maps()
    made: dict[str, Any] = conv.layers(CASE, x)
    like = partial(F.conv2d, padding=1)
    for name in ("conv2d", "ConvNN2d, space"):
        torch.testing.assert_close(made[name](x), like(x, made[name].weight, made[name].bias))
    only = made["HybridConv2d, ratio 0"]
    torch.testing.assert_close(only(x), only.pointwise(like(x, only.conv.weight, only.conv.bias)))
    space = made["HybridConv2d, space"]
    parts = [like(x, part.weight, part.bias) for part in (space.convnn, space.conv)]
    torch.testing.assert_close(space(x), torch.cat(parts, 1))
    assert made["HybridConv2d"].convnn.k == made["ConvNN2d"].k == CASE.k
    torch.testing.assert_close(made["HybridConv2d, plain"](x), made["HybridConv2d"](x), rtol=1e-4, atol=1e-5)
    for each in conv.contenders(CASE, x):
        if each.parameters:  # each has a gradient, or this raises
            torch.autograd.grad(each.function(*each.inputs).sum(), each.parameters)


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_the_checks_pass_what_is_right(dtype: torch.dtype) -> None:
    conv.checked(CASE, some_maps(dtype))
    for case in LONG:
        long.checked(case, long.problem(case, "cpu", dtype))


def test_gathered_neighbours_are_the_operator_with_any_kernel() -> None:
    query, cells, kernel = torch.randn(2, 11, 6), torch.randn(2, 17, 6), torch.randn(7, 6, 4)
    given = [tensor.double() for tensor in (query, cells, cells, kernel)]
    for options in ({"similarity": "cosine", "weighting": "uniform"}, {"similarity": "scaled_dot"}):
        ways: Any = options
        output, found = convnn(*given, k=4, backend="reference", return_neighbors=True, **ways)
        torch.testing.assert_close(gathered(*given, index=found.index, **ways), output)


def a_gradient_scaled(number: int, *given: Tensor, **options: Any) -> Tensor:
    """The operator, with one of its gradients too large by a twentieth."""
    leaves = list(given)
    leaves[number] = leaves[number] * 1.05 - leaves[number].detach() * 0.05
    return convnn(*leaves, **options)


@pytest.mark.parametrize("number", range(2, 4))
def test_the_check_finds_a_wrong_gradient_of_a_kernel_that_mixes(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "convnn", partial(a_gradient_scaled, number))
    with pytest.raises(ValueError, match=f"uniform: the {checking.NAMES[number + 1]} is off by"):
        conv.checked(CASE, some_maps())


def test_the_check_finds_a_gradient_that_should_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checking, "convnn", lambda query, *rest, **options: convnn(query, *rest, **options) + query.sum()
    )
    cells, kernel = conv.problem(CASE, some_maps())
    monkeypatch.setitem(checking.ERROR, SINGLE, 1e9)  # whatever is wrong with the output
    with pytest.raises(ValueError, match="the gradient of query is off by"):
        check("case", [*[cells[None]] * 3, kernel], CASE.k, similarity="cosine", weighting="uniform")


@pytest.mark.parametrize("case", LONG[1:], ids=str)
def test_the_check_finds_neighbours_a_rule_forbids(case: long.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = long.problem(case, "cpu", SINGLE)
    monkeypatch.setattr(
        checking, "nearest", lambda *given, **options: functional.nearest(*given, **{**options, "mask": None})
    )
    with pytest.raises(ValueError, match="not its nearest keys"):
        long.checked(case, inputs)


def test_a_sample_of_rows_is_enough_to_find_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = long.problem(LONG[0], "cpu", SINGLE)
    wrong = torch.ones(37, 1)
    wrong[11] = 1.05
    monkeypatch.setattr(checking, "convnn", lambda *given, **options: convnn(*given, **options) * wrong)
    check("case", inputs, 5, rows=torch.tensor([2, 10, 12, 30]))
    with pytest.raises(ValueError, match="is off by"):
        check("case", inputs, 5, rows=torch.tensor([2, 11, 30]))


def test_few_scores_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SCORES", 3 * 53)
    long.checked(LONG[0], long.problem(LONG[0], "cpu", SINGLE))


def test_layers_that_are_not_right_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x, search = some_maps(), ConvNN2d(8, 12, 3, padding=1, similarity="cosine")
    broken: dict[str, Any] = {"_searched": search, "_convolved": HybridConv2d(8, 12, 3, similarity="space")}
    for name, layer in broken.items():
        maps.check_map("case", layer, x)
        right = getattr(ConvNN2d, name)
        monkeypatch.setattr(ConvNN2d, name, lambda *given, right=right: right(*given) * 1.05)
        with pytest.raises(ValueError, match="case: the layer is off by"):
            maps.check_map("case", layer, x)
        monkeypatch.undo()


def test_contenders_over_many_keys_compute_what_their_names_say() -> None:
    for case in LONG:
        inputs = long.problem(case, "cpu", SINGLE)
        found = {each.name: each.function(*each.inputs) for each in long.contenders(case, inputs)}
        i, j = torch.arange(case.queries)[:, None], torch.arange(case.keys)
        seen = (j <= i) | (not case.is_causal)
        near = seen & ((i - j).abs() <= (case.keys if case.back is None else case.back))
        ours = partial(convnn, k=5, mask=near, backend="reference")
        dense = partial(F.scaled_dot_product_attention, attn_mask=seen)(*inputs[:3])
        expected = [dense, ours(*inputs), ours(*inputs[:3])]
        assert list(found) == ["sdpa, causal" if case.is_causal else "sdpa", "convnn", "convnn, no kernel"]
        for output, right in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-5)


def test_the_tables_have_the_sizes_that_are_asked_for() -> None:
    assert conv.CASES[0] == conv.Case(128, 32, 64, 64, 9)
    assert {(case.queries, case.keys) for case in long.CASES} >= {(16384, 16384), (65536, 65536), (1000, 1_000_000)}


def test_plain_weights_are_those_of_the_scores() -> None:
    cells, kernel = torch.randn(2, 13, 6), torch.randn(5, 6, 4)
    given: Any = {"k": 4, "weighting": "softmax"}
    one, other = (way(cells, cells, kernel, **given) for way in (plain.mixed, plain.contracted))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one, maps.ours(cells, cells, kernel, **given), rtol=1e-4, atol=1e-5)
