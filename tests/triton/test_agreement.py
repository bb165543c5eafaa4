"""The Triton backend against the reference, outputs and all gradients; interpreted where there is no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from convnn.functional import convnn
from convnn.masks import causal, strided, window
from convnn.similarity import Bilinear, Mahalanobis
from convnn.weighting import LearnedTemperature, softmax_at
from tests.agreement.problems import PROBLEMS, Problem
from tests.agreement.test_backends import expected, run
from tests.triton.runner import DEVICE, Case, assert_agrees


def of(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


BOOLS = torch.rand(40, 300, generator=of()) < 0.04
FLOATS = torch.randn(40, 300, generator=of(1))
PADDING = torch.rand(2, 1, 300, generator=of(2)) < 0.5
HALF, BRAIN = torch.float16, torch.bfloat16
SMALL = (30, 40, 12, 7)

# More keys than one program holds, unless said otherwise.
CASES = [
    Case("a stream"),
    Case("a stream of bfloat16", dtype=BRAIN),
    Case("a stream of float16", dtype=HALF, kernel=False),
    Case("many neighbours in a stream", (16, 300, 12, 7), k=25, lead=(), dtype=BRAIN),
    Case("more neighbours than a stream certifies", (16, 300, 12, 7), k=60, lead=()),
    Case("many channels", (16, 300, 150, 70), lead=()),
    Case("causal", (140, 300, 12, 7), lead=(), options={"mask": causal}),
    Case("causal, bfloat16", (300, 290, 12, 7), lead=(), dtype=BRAIN, options={"mask": causal}),
    Case("window", (140, 300, 12, 7), lead=(), options={"mask": window(15)}),
    Case("window and causal", (140, 300, 12, 7), lead=(), options={"mask": window(15) & causal}),
    Case("a rule", lead=(), options={"mask": strided(17)}),
    Case("key padding", options={"mask": PADDING}),
    Case("key padding, distances", options={"mask": PADDING, "similarity": "euclidean"}),
    Case("bool mask with few to choose", options={"mask": BOOLS}),
    Case("float mask", options={"mask": FLOATS}),
    Case("float mask, squared distance", options={"mask": FLOATS, "similarity": "sqeuclidean"}),
    Case("float mask, distance", options={"mask": FLOATS, "similarity": "euclidean"}),
    Case("few channels, distance", (40, 300, 3, 7), options={"similarity": "euclidean"}),
    Case("cosine, softmin", options={"similarity": "cosine", "weighting": "softmin"}),
    Case("pearson, uniform", options={"similarity": "pearson", "weighting": "uniform"}),
    Case("key order", options={"order": "key"}),
    Case("candidates and selves", options={"candidates": torch.arange(0, 300, 2), "self_index": torch.arange(40)}),
    Case("few keys, bfloat16", SMALL, dtype=BRAIN, options={"similarity": "dot"}),
    Case("few keys, all of them", (30, 33, 12, 7), k=33),
    Case("few keys, cold", SMALL, options={"weighting": softmax_at(0.2)}),
    Case("one query, one key", (1, 1, 5, 3), k=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_agrees_with_the_reference(case: Case) -> None:
    moved = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in case.options.items()}
    assert_agrees(replace(case, options=moved))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_triton_agrees_on_every_problem(problem: Problem) -> None:
    single = replace(problem, dtype=torch.float32) if problem.dtype == torch.float64 else problem
    ours, theirs = run(single, "triton", device=DEVICE), expected(problem)
    tolerance = 1e-4 if single.dtype == torch.float32 else 2e-2
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.cpu().double(), theirs[name].double(), rtol=tolerance, atol=tolerance)


def gradients(module: torch.nn.Module, option: str, backend: str, dtype: torch.dtype) -> list[Tensor]:
    query, key = (torch.randn(20, 12, generator=of(seed)).to(DEVICE, dtype) for seed in (0, 1))
    output = convnn(query, key, key[:, :5], k=4, backend=backend, **{option: module.to(DEVICE, dtype)})  # type: ignore[call-overload]
    return list(torch.autograd.grad(output.square().sum(), list(module.parameters())))


@pytest.mark.parametrize(
    ("option", "module"),
    [
        ("similarity", Bilinear(12)),
        ("similarity", Mahalanobis(torch.eye(12) + 0.1, learned=True)),
        ("weighting", LearnedTemperature(0.7)),
    ],
)
def test_what_a_strategy_learns_gets_its_gradient(option: str, module: Any) -> None:
    ours = gradients(module, option, "triton", torch.float32)
    theirs = gradients(module, option, "reference", torch.float64)
    torch.testing.assert_close([g.double() for g in ours], theirs, rtol=1e-3, atol=1e-3)
