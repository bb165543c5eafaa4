"""Every key, without a kernel, is torch's attention wherever that is the same thing; and chunked's elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.backends.record import Backend
from convnn.backends.triton import gates
from convnn.functional import convnn as operator
from convnn.masks import causal, strided, window
from convnn.relative import RelativeBias
from convnn.similarity import Bilinear, Mahalanobis
from convnn.weighting import LearnedTemperature, softmax_at
from tests.triton.runner import DEVICE, Case, assert_agrees


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
