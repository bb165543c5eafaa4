"""Searches over few keys, which one kernel runs and one runs backwards: values and all gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.backends.triton import few, few_ops
from convnn.functional import convnn, nearest
from convnn.masks import causal, strided, window
from convnn.weighting import LearnedTemperature, softmax_at
from tests.triton.runner import DEVICE, Case, assert_agrees, step

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def moved(options: dict[str, Any]) -> dict[str, Any]:
    def to(given: Any) -> Any:
        return (
            [to(each) for each in given] if isinstance(given, list) else getattr(given, "to", lambda _: given)(DEVICE)
        )

    return {name: to(given) for name, given in options.items()}


def of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(count: int, keys: int, *lead: int) -> Tensor:
    return torch.rand(*lead, keys, generator=of(3)).argsort(-1)[..., :count]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether searches were taken by the kernels for few keys, one after the other."""
    said: list[bool] = []
    takes = few.takes

    def asked(*given: Any) -> bool:
        said.append(takes(*given))
        return said[-1]

    monkeypatch.setattr(few, "takes", asked)
    return said


SIZES = (70, 90, 12, 7)  # two tiles of rows
AMONG = drawn(21, 90)
PADDING = torch.rand(2, 1, 90, generator=of(2)) < 0.2
FLOATS = torch.randn(2, 70, 40, generator=of(1))
FLOATS[0, :, 3], FLOATS[1, 5] = -torch.inf, -torch.inf

CASES = [
    Case("candidates", SIZES, options={"candidates": AMONG}),
    Case("candidates of each head", SIZES, options={"candidates": drawn(21, 90, 2)}),
    Case("candidates, some of them none", SIZES, options={"candidates": torch.where(AMONG % 3 == 0, -1, AMONG)}),
    Case("candidates of bfloat16", SIZES, dtype=BRAIN, options={"candidates": AMONG}),
    Case("candidates of float16", SIZES, dtype=HALF, options={"candidates": AMONG}),
    Case("the same candidate twice", SIZES, options={"candidates": torch.cat([AMONG, AMONG[4:9], AMONG[4:6]])}),
    Case("the same candidate twice, one tile", (30, 90, 12, 7), options={"candidates": torch.cat([AMONG, AMONG[4:9]])}),
    Case("few keys", (70, 40, 20, 33)),
    Case("few keys of bfloat16, no kernel", (70, 40, 20, 33), kernel=False, dtype=BRAIN),
    Case("few keys, no kernel", (70, 10, 3, 5), kernel=False),
    Case("few keys, uniform", (70, 40, 20, 33), options={"weighting": "uniform"}),
    Case("few keys, uniform, no kernel", (70, 40, 20, 33), kernel=False, options={"weighting": "uniform"}),
    Case("as many as there may be", (70, 64, 64, 64), k=11, lead=()),
    Case("as wide as may be", (70, 32, 128, 100), k=11, lead=()),
    Case("as many as there may be, bfloat16", (70, 64, 128, 128), k=20, lead=(), dtype=BRAIN),
    Case("every one of them", (70, 19, 12, 7), k=19, options={"mask": causal}),
    Case("causal", (70, 40, 12, 7), options={"mask": causal}),
    Case("causal, bfloat16", (70, 40, 12, 7), dtype=BRAIN, options={"mask": causal}),
    Case("window and causal", (70, 40, 12, 7), options={"mask": window(6) & causal}),
    Case("a rule", (70, 40, 12, 7), options={"mask": strided(7)}),
    Case("a rule for candidates", SIZES, options={"mask": strided(7), "candidates": AMONG}),
    Case("few to choose", (70, 40, 12, 7), options={"mask": torch.rand(2, 70, 40, generator=of(2)) < 0.1}),
    Case("padding", (70, 40, 12, 7), options={"mask": PADDING[..., :40]}),
    Case("padded candidates", SIZES, options={"candidates": AMONG, "mask": PADDING}),
    Case("float mask", (70, 40, 12, 7), options={"mask": FLOATS}),
    Case("float mask, cold", (70, 40, 12, 7), options={"mask": FLOATS, "weighting": softmax_at(0.3)}),
    Case("two float masks", (70, 40, 12, 7), options={"mask": [FLOATS, FLOATS[1:, 6:7], strided(3)]}),
    Case("cosine", (70, 40, 12, 7), options={"similarity": "cosine"}),
    Case("dot", (70, 40, 12, 7), options={"similarity": "dot"}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_few_keys_agree_with_the_reference(case: Case, taken: list[bool]) -> None:
    assert_agrees(replace(case, options=moved(case.options)))
    assert taken == [True]


@pytest.mark.parametrize("name", ["candidates", "the same candidate twice", "few keys of bfloat16, no kernel"])
def test_one_program_may_take_all_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from convnn.backends.triton import few_launch  # noqa: PLC0415

    monkeypatch.setattr(few_launch, "BUSY", 1)
    (case,) = (case for case in CASES if case.name == name)
    assert_agrees(replace(case, options=moved(case.options)))


@pytest.mark.parametrize(
    "options",
    [
        {"similarity": "euclidean"},
        {"weighting": "softmin"},
        {"order": "key"},
        {"self_index": torch.arange(30, device=DEVICE)},
        {"candidates": torch.arange(65, device=DEVICE)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_the_kernels_do_not_know_goes_the_other_way(options: dict[str, Any], taken: list[bool]) -> None:
    keys = 90 if "candidates" in options else 40
    assert_agrees(Case("", (30, keys, 12, 7), options=options))
    assert taken == [False]


def test_what_fills_a_program_twice_goes_the_other_way(taken: list[bool]) -> None:
    assert_agrees(Case("", (30, 64, 128, 7), k=5, lead=()))
    assert_agrees(Case("", (30, 64, 7, 128), k=5, lead=(), dtype=BRAIN))
    assert taken == [False, True]


def test_a_learned_temperature_gets_its_gradient(taken: list[bool]) -> None:
    query, key, value = Case("", (70, 40, 12, 7), kernel=False).leaves()

    def gradient(dtype: torch.dtype, backend: str) -> Tensor:
        module = LearnedTemperature(0.7).to(DEVICE, dtype)
        output = convnn(query.to(dtype), key.to(dtype), value.to(dtype), k=4, weighting=module, backend=backend)
        return torch.autograd.grad(output.square().sum(), list(module.parameters()))[0].double()

    torch.testing.assert_close(gradient(SINGLE, "triton"), gradient(torch.float64, "reference"), rtol=1e-4, atol=1e-4)
    assert taken == [True]


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize("number", [0.0, -1.0])
def test_equal_keys_count_once_each(number: float, dtype: torch.dtype) -> None:
    query = torch.ones(9, 16, dtype=dtype, device=DEVICE)
    key, value = torch.full((50, 16), number, dtype=dtype, device=DEVICE), torch.eye(50, dtype=dtype, device=DEVICE)
    output = convnn(query, key, value, k=7, weighting="uniform", backend="triton")
    assert ((output == 1).sum(-1) == 7).all()
    assert ((output == 0).sum(-1) == 43).all()


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
@pytest.mark.parametrize("kernel", [True, False])
def test_the_chosen_are_those_of_the_search(kernel: bool, dtype: torch.dtype) -> None:
    case = Case("", (70, 40, 20, 40), dtype=dtype, lead=())
    query, key = case.leaves()[:2]
    value = torch.eye(40, dtype=dtype, device=DEVICE)
    taps = torch.arange(1.0, 6.0, device=DEVICE).to(dtype).expand(40, 1, 5) if kernel else None
    output = convnn(query, key, value, taps, k=5, weighting="uniform", backend="triton")
    index = nearest(query.double(), key.double(), k=5, backend="reference").index
    ranks = torch.arange(1, 6, device=DEVICE) if kernel else torch.ones(5, device=DEVICE)
    expected = torch.zeros(70, 40, device=DEVICE).scatter_(-1, index, ranks.float().expand(70, 5))
    torch.testing.assert_close(output.float(), expected)


def test_two_runs_are_equal_bit_by_bit() -> None:
    case = Case("twice", SIZES, k=9, dtype=BRAIN)
    options = {"candidates": AMONG.to(DEVICE)}
    first, second = (step(case.leaves(), 9, options, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_large_scores_of_half_types_train_as_they_choose() -> None:
    query, key, value = Case("", (12, 40, 64, 5), lead=(), kernel=False).leaves()
    key = 4 * (key[:1] + 0.02 * key)  # scores of hundreds, which differ by little
    leaves = [x.bfloat16() for x in (8 * query, key, value)]
    ours = step(leaves, 4, {"similarity": "dot"}, "triton")
    theirs = step([x.double() for x in leaves], 4, {"similarity": "dot"}, "reference")
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine.double() - exact).norm() <= 3e-2 * exact.norm()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_accepts_the_operator() -> None:
    query, key, value, taps = (
        torch.randn(shape, device=DEVICE, requires_grad=True)
        for shape in ((1, 2, 9, 8), (1, 2, 11, 8), (1, 2, 11, 6), (6, 3))
    )
    among = torch.arange(7, device=DEVICE).expand(1, 2, 7)
    numbers = (3, 1, 0.3, 1.0, False, -1)
    torch.library.opcheck(few_ops.attend_few.overload, (query, key, value, taps, None, among, *(None,) * 3, *numbers))
    torch.library.opcheck(few_ops.attend_few.overload, (query, key, value, *(None,) * 6, *numbers))


def test_it_compiles_without_a_break() -> None:
    leaves: Any = [leaf.requires_grad_() for leaf in Case("compiled", SIZES, k=4).leaves()]

    def run(*tensors: Tensor) -> Tensor:
        return convnn(*tensors, k=4, candidates=AMONG.to(DEVICE), backend="triton")

    ours, theirs = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves))


def test_no_queries() -> None:
    query, key, value = (torch.randn(size, 6, device=DEVICE, requires_grad=True) for size in (0, 9, 9))
    output = convnn(query, key, value, k=3, backend="triton")
    gradients = torch.autograd.grad(output.sum(), (key, value))
    assert output.shape == (0, 6)
    assert all(gradient.eq(0).all() for gradient in gradients)
