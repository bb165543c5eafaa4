"""Every backend against the reference, in outputs and gradients, on random searches."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from convnn.backends import Backend
from convnn.backends.chunked import with_budget
from convnn.functional import convnn
from convnn.masks import Mask
from convnn.similarity import SIMILARITIES, Similarity, minkowski
from convnn.weighting import WEIGHTINGS, Weighting, softmax_at
from convnn_lab.verify.drawing import Answer, Case, Problem, between, call, coin, one_of
from convnn_lab.verify.rows import ANYWHERE

# One block is enough for problems as small as these, unless the budget is smaller still.
OTHERS: dict[str, str | Backend] = {name: name for name in ANYWHERE if name != "reference"}
OTHERS["chunked in blocks of 97"] = with_budget(97)


def every_third(i: Tensor, j: Tensor) -> Tensor:
    """A rule that forbids."""
    return (i + j) % 3 == 0


def slope(i: Tensor, j: Tensor) -> Tensor:
    """A rule that shifts scores."""
    return -0.1 * (i - j).abs()


# By name, so that the arguments of a case can be read.
CHOICES: dict[str, dict[str, Similarity | Weighting | Mask | str | None]] = {
    "similarity": {**SIMILARITIES, "minkowski(3)": minkowski(3)},
    "weighting": {**WEIGHTINGS, "softmax_at(0.5)": softmax_at(0.5)},
    "mask": {"none": None, "causal": "causal", "every_third": every_third, "slope": slope},
}


def agreement(kind: Literal["nearest", "kernel", "all", "candidates"]) -> Case:
    """Make a case of one kind of search."""

    def case() -> Problem:
        named = {name: one_of(*choices) for name, choices in CHOICES.items()}
        tensors = _tensors()
        keys, channels = tensors["value"].shape[-2:]
        k = between(1, min(keys, 9))
        options: dict[str, Any] = {"k": "all" if kind == "all" else k, "order": one_of("score", "key")}
        if kind == "candidates":
            tensors["candidates"] = _candidates(tensors["key"], between(k, keys))
            if coin():
                tensors["self_index"] = torch.randint(-1, keys, tensors["query"].shape[-2:-1])
                options["self_score"] = one_of("true", "one")
        if kind == "kernel" or (kind == "candidates" and coin()):
            groups = one_of(1, 2, channels)
            tensors["kernel"] = torch.randn(groups * between(1, 3), channels // groups, k)
            tensors["bias"] = torch.randn(tensors["kernel"].shape[0])
        if coin():
            tensors["mask"] = _mask(tensors["query"].shape[-2], keys)
        options |= {name: CHOICES[name].get(chosen) for name, chosen in named.items() if name not in tensors}
        said = call("convnn", **{**options, **named, **tensors})
        return Problem(
            lambda backend: _run(tensors, options, backend), lambda: _run(tensors, options, "reference"), said, True
        )

    return case


def _tensors() -> dict[str, Tensor]:
    queries, keys, channels = between(1, 9), between(1, 15), 2 * between(1, 3)
    # In two channels a correlation is 1 or -1, and most keys would tie.
    compared = between(3, 8)
    query, key, value = one_of(
        ((), (), ()), ((2,), (2,), (2,)), ((2, 3), (3,), (2, 1)), ((3,), (), (2, 3)), ((), (2,), ())
    )
    return {
        "query": torch.randn(*query, queries, compared),
        "key": torch.randn(*key, keys, compared),
        "value": torch.randn(*value, keys, channels),
    }


def _candidates(key: Tensor, count: int) -> Tensor:
    """Draw different keys, the same for all or for each set of keys its own; some places may be empty."""
    lead = key.shape[:-2] if coin() else ()
    index = torch.rand(*lead, key.shape[-2]).argsort(-1)[..., :count]
    return index.masked_fill(torch.rand(index.shape) < 0.1, -1)


def _mask(queries: int, keys: int) -> Tensor:
    """Draw a bool or a float mask; some queries may be left with nothing."""
    allowed = torch.rand(one_of(1, queries), keys) < 0.6
    return allowed if coin() else torch.randn(allowed.shape).masked_fill(~allowed, -torch.inf)


def _run(tensors: dict[str, Tensor], options: dict[str, Any], backend: str | Backend) -> Answer:
    """The output, and the gradient of every tensor that has one."""
    leaves: dict[str, Any] = {
        name: tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    output = convnn(**leaves, **options, backend=backend)
    pull = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    gradients = torch.autograd.grad(output, wanted, pull, allow_unused=True, materialize_grads=True)
    return (output.detach(), *gradients)
