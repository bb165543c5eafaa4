"""Every key, without a kernel, is torch's attention wherever that is the same thing; and chunked's elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.backends import chunked, reference
from convnn.backends.record import Backend
from convnn.backends.triton import gates
from convnn.functional import convnn as operator
from convnn.masks import causal, strided, window
from convnn.relative import RelativeBias
from convnn.similarity import Bilinear, Mahalanobis
from convnn.weighting import LearnedTemperature, softmax_at
from tests.triton.runner import DEVICE, Case, assert_agrees, step


def of(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(*shape: int, share: float = 0.5) -> Tensor:
    """A bool mask with a row that may choose nobody and, where it has several, a key nobody may choose."""
    mask = torch.rand(shape, generator=of()) < share
    mask[..., 3] = False
    mask[..., 0, :] = shape[-2] == 1
    return mask


ALL: Any = "all"
BRAIN = torch.bfloat16
SIZES = (10, 14, 8, 6)  # N, M, E, C
MASKS: dict[str, Any] = {
    "bool": some(10, 14),
    "bool by sample": some(2, 10, 14),
    "key padding": some(2, 1, 14),
    "window": window(3),
    "window, far queries": (window(1), (25, 14, 8, 6)),
    "causal": causal,
    "causal, more queries than keys": (causal, (19, 14, 8, 6)),
    "causal, more keys than queries": (causal, (5, 14, 8, 6)),
    "window and causal": window(3) & causal,
    "a rule": strided(4),
    "causal and key padding": [causal, some(2, 1, 14)],
    "float": torch.randn(10, 14, generator=of(1)),
    "float by sample, with -inf": torch.randn(2, 10, 14, generator=of(1)).masked_fill(~some(2, 10, 14), -torch.inf),
    "float by key": torch.randn(1, 14, generator=of(1)),
    "float and window": [torch.randn(10, 14, generator=of(1)), window(4)],
    "one column": torch.arange(10)[:, None] % 3 > 0,
}
WEIGHTINGS: dict[str, Any] = {"softmax": "softmax", "softmin": "softmin", "cold": softmax_at(0.3)}


def moved(mask: Any) -> Any:
    return (
        [moved(each) for each in mask]
        if isinstance(mask, list)
        else mask.to(DEVICE)
        if isinstance(mask, Tensor)
        else mask
    )


@pytest.fixture
def only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is asked."""

    def otherwise() -> Backend:
        raise AssertionError("this should be torch's attention")

    monkeypatch.setattr(gates, "otherwise", otherwise)


def case_of(name: str, **options: Any) -> Case:
    mask = MASKS[name]
    mask, sizes = mask if isinstance(mask, tuple) else (mask, SIZES)
    return Case(name, sizes, k=ALL, kernel=False, options={"mask": moved(mask), **options})


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_temperatures_are_torchs_attention(mask: str, weighting: str) -> None:
    assert_agrees(case_of(mask, weighting=WEIGHTINGS[weighting]))


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("similarity", ["dot", "cosine", "pearson", Bilinear(8)])
@pytest.mark.parametrize("mask", ["bool", "causal", "float"])
def test_every_dot_product_is_torchs_attention(mask: str, similarity: Any) -> None:
    similarity = similarity if isinstance(similarity, str) else similarity.to(DEVICE)
    assert_agrees(case_of(mask, similarity=similarity))


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("options", [{"similarity": "cosine"}, {}], ids=str)
@pytest.mark.parametrize("mask", ["bool by sample", "key padding", "causal", "float"])
def test_half_types_are_torchs_attention(mask: str, options: dict[str, Any]) -> None:
    assert_agrees(replace(case_of(mask, **options), dtype=BRAIN))


@pytest.mark.usefixtures("only_torch")
def test_a_mask_of_more_digits_keeps_them() -> None:
    query, key, value = (x.bfloat16() for x in replace(case_of("bool"), lead=()).leaves())
    slope = -100.0 - torch.rand(10, 14, generator=of()).to(DEVICE)  # in bfloat16 a half
    ours = operator(query, key, value, k=ALL, mask=slope, backend="triton")
    theirs = operator(query.double(), key.double(), value.double(), k=ALL, mask=slope.double(), backend="reference")
    assert ours.dtype == BRAIN
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=5e-3)


@pytest.mark.usefixtures("only_torch")
def test_candidates_and_own_keys_are_torchs_attention() -> None:
    among, own = torch.tensor([[-1, 1, 2, 9], [0, 13, 11, 9]], device=DEVICE), torch.arange(10, device=DEVICE)
    for options in ({"candidates": among}, {"candidates": among, "mask": causal}, {"self_index": own}):
        assert_agrees(Case("", SIZES, k=ALL, kernel=False, options=options))


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2)])
def test_any_leading_dimensions_will_do(lead: tuple[int, ...]) -> None:
    for shape in ((10, 14), (*lead, 1, 14), (*lead[-1:], 10, 14)):
        mask = some(*shape).to(DEVICE)
        assert_agrees(Case("", SIZES, k=ALL, kernel=False, lead=lead, options={"mask": mask}))


def learned(backend: str, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in Case("", (12, 12, 8, 6), lead=(3, 2), kernel=False).leaves()]
    modules = [module.to(DEVICE, dtype) for module in options.values()]
    output = operator(*leaves, k=ALL, backend=backend, **dict(zip(options, modules, strict=True)))
    pull = torch.randn(output.shape, generator=of(3)).to(output)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [output, *torch.autograd.grad(output, [*leaves, *parameters], pull)]


@pytest.mark.usefixtures("only_torch")
def test_a_learned_temperature_and_a_relative_bias_learn() -> None:
    bias = RelativeBias((3, 4), heads=2)
    torch.nn.init.normal_(bias.table, generator=of(5))
    options: dict[str, Any] = {"weighting": LearnedTemperature(0.6), "mask": bias}
    ours = learned("triton", torch.float32, **options)
    theirs = learned("reference", torch.float64, **options)
    torch.testing.assert_close([x.double() for x in ours], theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("only_torch")
def test_dropout_drops_weights_and_leaves_their_mean() -> None:
    query, key, value = replace(case_of("bool"), lead=()).leaves()
    mask = MASKS["bool"].to(DEVICE)
    whole = operator(query, key, value, k=ALL, mask=mask, backend="triton")
    draws = torch.stack([
        operator(query, key, value, k=ALL, mask=mask, dropout_p=0.4, backend="triton") for _ in range(2000)
    ])  # fmt: skip
    assert not torch.allclose(draws[0], draws[1])
    torch.testing.assert_close(draws.mean(0), whole, rtol=0.2, atol=0.2)


@pytest.mark.parametrize(
    "options",
    [
        {"weighting": "uniform"},
        {"weighting": "sparsemax"},
        {"similarity": "euclidean"},
        {"similarity": Mahalanobis(torch.eye(8))},
        {"self_index": torch.arange(10), "self_score": "one"},
    ],
    ids=str,
)
def test_what_is_something_else_is_computed_elsewhere(options: dict[str, Any]) -> None:
    options = {name: x.to(DEVICE) if isinstance(x, (Tensor, torch.nn.Module)) else x for name, x in options.items()}
    assert_agrees(Case("", SIZES, k=ALL, kernel=False, options={"mask": MASKS["bool"].to(DEVICE), **options}))


@pytest.mark.parametrize("dropped", [0.0, 0.2])
@pytest.mark.parametrize(
    "mask", ["causal", "causal, more queries than keys", "window", "bool by sample", "key padding"]
)
def test_a_nan_reaches_the_rows_that_may_see_it_and_no_others(mask: str, dropped: float) -> None:
    case = case_of(mask, dropout_p=dropped)
    query, key, value = case.leaves()
    key[0, 3:5, 1], query[1, 2, 0] = torch.nan, torch.nan
    query[1, 0] = torch.nan  # behind a bool mask it may choose nobody
    ours = operator(query, key, value, k=ALL, backend="triton", **case.options)
    theirs = operator(query, key, value, k=ALL, backend="reference", **case.options)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert ours.isnan().any()
    assert not ours.isnan().all()
    if not dropped:
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("similarity", ["scaled_dot", "cosine", Bilinear(8)])
def test_what_nobody_may_choose_is_in_no_gradient(similarity: Any) -> None:
    similarity = similarity if isinstance(similarity, str) else similarity.to(DEVICE)
    case = replace(case_of("bool by sample"), lead=(2,))
    case.options["similarity"] = similarity
    clean = case.leaves()
    spoilt = [leaf.clone() for leaf in clean]
    spoilt[0][:, 0], spoilt[1][:, 3], spoilt[2][:, 3] = torch.nan, torch.nan, torch.nan
    ours, theirs = step(spoilt, ALL, case.options, "triton"), step(clean, ALL, case.options, "triton")
    torch.testing.assert_close(ours, theirs)
    assert (ours[1][:, 0] == 0).all()
    assert (ours[2][:, 3] == 0).all()


def count_others(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever somebody else is asked."""
    asked: list[int] = []

    def otherwise() -> Backend:
        asked.append(1)
        return chunked.BACKEND

    monkeypatch.setattr(gates, "otherwise", otherwise)
    return asked


BUDGETED: dict[str, tuple[Any, bool]] = {
    "a rule": (strided(4), False),
    "a window": (window(3), False),
    "causal": (causal, True),
    "key padding": (some(2, 1, 14), True),
    "a tensor of the caller": (some(10, 14), True),
    "causal and key padding": ([causal, some(2, 1, 14)], False),
    "a tensor that is spread over samples": ([some(2, 1, 14), torch.ones(10, 14).bool()], False),
}


@pytest.mark.parametrize("name", BUDGETED)
def test_no_mask_beyond_the_budget_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, stays = BUDGETED[name]
    for device in ("ON_CPU", "ELSEWHERE"):
        monkeypatch.setattr(chunked, device, 100)  # and there are 140 pairs
    asked = count_others(monkeypatch)
    assert_agrees(Case("", SIZES, k=ALL, kernel=False, options={"mask": moved(mask)}))
    assert (not asked) == stays


def test_the_gradient_of_a_shared_mask_counts_for_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("ON_CPU", "ELSEWHERE"):
        monkeypatch.setattr(chunked, device, 200)
    asked = count_others(monkeypatch)
    case = case_of("float")
    assert_agrees(case)
    assert asked
    asked.clear()
    with torch.no_grad():
        operator(*case.leaves(), k=ALL, backend="triton", **case.options)
    assert not asked


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("mask", ["causal", "causal and key padding", "window", "float"])
def test_it_compiles_without_a_break(mask: str) -> None:
    torch.compiler.reset()
    case, temperature = case_of(mask), LearnedTemperature(0.7).to(DEVICE)

    def run(*tensors: Tensor) -> Tensor:
        return operator(*tensors, k=ALL, weighting=temperature, backend="triton", **case.options)

    leaves = [leaf.requires_grad_() for leaf in case.leaves()]
    ours, theirs = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves), run(*leaves)
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(y.square().sum(), leaves) for y in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("empty", ["queries", "batch"])
def test_nothing_to_attend_gives_nothing(empty: str) -> None:
    shapes = {"queries": ((2, 0, 8), (2, 5, 8), (2, 5, 6)), "batch": ((0, 3, 8), (0, 5, 8), (0, 5, 6))}[empty]
    query, key, value = (torch.randn(shape, device=DEVICE) for shape in shapes)
    assert operator(query, key, value, k=ALL, mask=causal, backend="triton").shape == (*shapes[0][:-1], 6)


def test_what_is_exported_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gates.otherwise() is chunked.BACKEND
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert gates.otherwise() is reference.BACKEND
