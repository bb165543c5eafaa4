"""One list of problems on which every backend must agree with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from convnn.similarity import minkowski
from convnn.weighting import on_exp, softmax, softmax_at

Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Problem:
    """Sizes and choices; ``bend`` changes the random tensors before they are used."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    lead: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((), (), ())
    kernel: tuple[int, int] | None = None
    bend: Callable[[Tensors], None] = lambda tensors: None  # noqa: ARG005
    dtype: torch.dtype = torch.float64
    sizes: tuple[int, int, int, int] = (7, 13, 5, 6)  # N, M, E, C

    def tensors(self, device: str = "cpu") -> Tensors:
        """Make the tensors, the same ones every time."""
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        n, m, e, c = self.sizes
        lead_query, lead_key, lead_value = self.lead
        made = {"query": randn(*lead_query, n, e), "key": randn(*lead_key, m, e), "value": randn(*lead_value, m, c)}
        if self.kernel is not None:
            made |= {"kernel": randn(*self.kernel, self.options["k"]), "bias": randn(self.kernel[0])}
        self.bend(made)
        return {
            name: tensor.to(device, self.dtype) if tensor.is_floating_point() else tensor.to(device)
            for name, tensor in made.items()
        }


def _bool_mask(tensors: Tensors) -> None:
    n, m = tensors["query"].shape[-2], tensors["key"].shape[-2]
    mask = torch.rand(2, n, m, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 0], mask[1, 3] = False, False  # nothing to choose
    mask[:, 1] = torch.arange(m) < 2  # fewer than k
    tensors["mask"] = mask


def _bool_mask_of_3(tensors: Tensors) -> None:
    _bool_mask(tensors)
    tensors["mask"] = tensors["mask"][:, None].expand(2, 3, -1, -1)


def _float_mask(tensors: Tensors) -> None:
    _bool_mask(tensors)
    shift = torch.randn(tensors["mask"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tensors["mask"] = shift.masked_fill(~tensors["mask"], -torch.inf)


def _padding_mask(tensors: Tensors) -> None:
    tensors["mask"] = (torch.arange(tensors["key"].shape[-2]) < torch.tensor([[5], [9], [0]]))[:, None, :]


def _pairs_of_equals(tensors: Tensors) -> None:
    tensors["key"][..., 1::2, :] = tensors["key"][..., 0:-1:2, :]


def _own_keys(tensors: Tensors) -> None:
    tensors["query"] = tensors["key"][..., : tensors["query"].shape[-2], :].clone()


def _zero_vectors(tensors: Tensors) -> None:
    tensors["query"][..., 2, :] = 0.0
    tensors["key"][..., 4:, :] = 0.0


def _transposed(tensors: Tensors) -> None:
    for name in ("query", "key", "value", "kernel"):
        tensors[name] = tensors[name].mT.contiguous().mT


def _expanded(tensors: Tensors) -> None:
    tensors["query"] = tensors["query"].expand(3, -1, -1)
    tensors["value"] = tensors["value"][..., :1].expand(-1, 6)


def _candidates(tensors: Tensors) -> None:
    _own_keys(tensors)
    tensors["candidates"] = torch.tensor([0, 2, 3, 7, 8, 12])


def _candidates_by_sample(tensors: Tensors) -> None:
    tensors["candidates"] = torch.tensor([[[1, 2, 5, 9, -1]], [[0, 12, 11, 6, 3]]])


def _candidates_behind_a_mask(tensors: Tensors) -> None:
    _bool_mask(tensors)
    tensors["candidates"] = torch.tensor([[0, 2, 3, 7, 8, 12], [0, 1, 4, 5, 6, 9]])


def _selves(tensors: Tensors) -> None:
    _own_keys(tensors)
    tensors["self_index"] = torch.arange(tensors["query"].shape[-2])


def _selves_among_candidates(tensors: Tensors) -> None:
    _selves(tensors)
    _candidates(tensors)


def _selves_behind_a_mask(tensors: Tensors) -> None:
    _candidates_behind_a_mask(tensors)
    tensors["self_index"] = torch.tensor([[4, 0, 2, -1, 9, 1, 12], [6, 5, -1, 3, 2, 1, 0]])


def _slope(i: Tensor, j: Tensor) -> Tensor:
    return -0.1 * (i - j).abs().double()


CAUSAL = {"mask": "causal"}
STANDARD, GROUPED, DEPTHWISE, MULTIPLIED = (4, 6), (8, 3), (6, 1), (12, 1)
BATCH = ((2, 3), (2, 3), (2, 3))
WIDE = (7, 13, 12, 6)

PROBLEMS = [
    Problem("sum", {"k": 3}),
    Problem("one neighbour", {"k": 1}, kernel=STANDARD),
    Problem("every key by number", {"k": 13}, kernel=DEPTHWISE),
    Problem("every key", {"k": "all"}),
    Problem("every key, causal", {"k": "all", **CAUSAL}, BATCH),
    Problem("every key, uniform, bool mask", {"k": "all", "weighting": "uniform"}, bend=_bool_mask),
    Problem("every key, float mask", {"k": "all"}, ((2,), (2,), (2,)), bend=_float_mask),
    Problem("every key, negative distance", {"k": "all", "similarity": "euclidean"}, BATCH),
    Problem("standard kernel", {"k": 4}, BATCH, STANDARD),
    Problem("grouped kernel", {"k": 4, "weighting": "uniform"}, BATCH, GROUPED),
    Problem("depthwise kernel", {"k": 4}, BATCH, DEPTHWISE),
    Problem("depthwise kernel with a multiplier", {"k": 4}, BATCH, MULTIPLIED),
    Problem("key order", {"k": 4, "order": "key"}, kernel=STANDARD, bend=_bool_mask),
    Problem("leading dimensions broadcast", {"k": 3}, ((4, 1), (3,), (4, 3)), GROUPED),
    Problem("one search for many values", {"k": 3}, ((), (), (4, 3)), GROUPED),
    Problem("one value for many searches", {"k": 3}, ((4, 1), (1, 3), ()), STANDARD),
    Problem("bool mask, uniform", {"k": 4, "weighting": "uniform"}, kernel=STANDARD, bend=_bool_mask),
    Problem("bool mask, softmax", {"k": 4}, ((3, 2), (2,), ()), STANDARD, _bool_mask),
    Problem("float mask", {"k": 4}, ((2,), (2,), (2,)), GROUPED, _float_mask),
    Problem("key padding mask", {"k": 4}, ((3,), (3,), (3,)), STANDARD, _padding_mask),
    Problem("every key, key padding mask", {"k": "all"}, ((3,), (3,), (3,)), bend=_padding_mask),
    Problem("causal", {"k": 4, **CAUSAL}, BATCH, DEPTHWISE),
    Problem("ties", {"k": 4, "weighting": "uniform"}, BATCH, STANDARD, _pairs_of_equals, sizes=(7, 12, 5, 6)),
    Problem("queries among the keys", {"k": 4, "similarity": "euclidean"}, BATCH, STANDARD, _own_keys),
    Problem("zero vectors", {"k": 13, "similarity": "cosine"}, kernel=STANDARD, bend=_zero_vectors),
    Problem("squared distance", {"k": 5, "similarity": "sqeuclidean"}, BATCH, GROUPED),
    Problem("pearson", {"k": 5, "similarity": "pearson", "weighting": "sparsemax"}, BATCH, GROUPED),
    Problem("manhattan", {"k": 5, "similarity": "manhattan", "weighting": "softmin"}, BATCH, bend=_own_keys),
    Problem("chebyshev", {"k": 5, "similarity": "chebyshev"}, BATCH, STANDARD),
    Problem("minkowski", {"k": 5, "similarity": minkowski(3)}, BATCH, STANDARD, bend=_own_keys),
    Problem("many channels, euclidean", {"k": 5, "similarity": "euclidean"}, BATCH, GROUPED, sizes=WIDE),
    Problem("many channels, manhattan", {"k": 5, "similarity": "manhattan"}, BATCH, bend=_bool_mask_of_3, sizes=WIDE),
    Problem("many channels, chebyshev, every key", {"k": "all", "similarity": "chebyshev"}, BATCH, sizes=WIDE),
    Problem("many channels, minkowski, every key", {"k": "all", "similarity": minkowski(2.5)}, BATCH, sizes=WIDE),
    Problem("bfloat16, chebyshev", {"k": 4, "similarity": "chebyshev"}, BATCH, GROUPED, dtype=torch.bfloat16),
    Problem("bfloat16, sparsemax", {"k": 4, "weighting": "sparsemax"}, BATCH, GROUPED, dtype=torch.bfloat16),
    Problem("every key, sparsemax, causal", {"k": "all", "weighting": "sparsemax", **CAUSAL}, BATCH),
    Problem("cold softmax with empty rows", {"k": 4, "weighting": softmax_at(0.1)}, kernel=STANDARD, bend=_bool_mask),
    Problem("softmax of exp(-D)", {"k": 4, "similarity": "sqeuclidean", "weighting": on_exp(softmax)}, bend=_bool_mask),
    Problem("plain dot", {"k": 5, "similarity": "dot", "weighting": "uniform"}, BATCH),
    Problem("transposed memory", {"k": 4}, BATCH, GROUPED, _transposed),
    Problem("expanded memory", {"k": 4}, kernel=STANDARD, bend=_expanded),
    Problem(
        "a custom weighting that counts ranks", {"k": "all", "weighting": lambda s, f: s.softmax(-1) * f.cumsum(-1)}
    ),
    Problem("candidates", {"k": 4}, BATCH, GROUPED, _candidates),
    Problem("candidates, causal, key order", {"k": 4, "order": "key", **CAUSAL}, BATCH, GROUPED, _candidates),
    Problem("candidates by sample", {"k": 3, "similarity": "cosine"}, BATCH, STANDARD, _candidates_by_sample),
    Problem("candidates by sample, one set of keys", {"k": 3}, ((2, 3), (3,), ()), bend=_candidates_by_sample),
    Problem("candidates behind a mask", {"k": 4}, ((2,), (2,), (2,)), GROUPED, _candidates_behind_a_mask),
    Problem("all candidates", {"k": "all"}, BATCH, bend=_candidates_by_sample),
    Problem("all candidates, float rule", {"k": "all", "mask": _slope}, BATCH, bend=_candidates),
    Problem("all candidates behind a mask", {"k": "all"}, ((), (2,), ()), bend=_candidates_behind_a_mask),
    Problem("selves", {"k": 4}, BATCH, STANDARD, _selves),
    Problem("selves count 1", {"k": 4, "self_score": "one", "similarity": "euclidean"}, BATCH, GROUPED, _selves),
    Problem("selves, causal, key order", {"k": 4, "order": "key", **CAUSAL}, BATCH, STANDARD, _selves),
    Problem("all, and selves count 1", {"k": "all", "self_score": "one"}, BATCH, bend=_selves),
    Problem("selves among candidates", {"k": 4, "self_score": "one"}, BATCH, GROUPED, _selves_among_candidates),
    Problem("all candidates and selves", {"k": "all"}, BATCH, bend=_selves_among_candidates),
    Problem("selves behind a mask", {"k": 5}, ((), (2,), ()), STANDARD, _selves_behind_a_mask),
    Problem("bfloat16, candidates, selves", {"k": 4}, BATCH, GROUPED, _selves_among_candidates, dtype=torch.bfloat16),
    Problem("no queries", {"k": 4}, kernel=STANDARD, sizes=(0, 13, 5, 6)),
    Problem("no batch", {"k": 4}, ((0, 3), (3,), (3,)), STANDARD),
    Problem("one query, one key", {"k": 1, "similarity": "euclidean"}, kernel=STANDARD, sizes=(1, 1, 5, 6)),
    Problem("float32", {"k": 4}, BATCH, STANDARD, dtype=torch.float32),
    Problem("bfloat16", {"k": 4}, BATCH, GROUPED, dtype=torch.bfloat16),
    Problem("bfloat16, every key", {"k": "all"}, BATCH, dtype=torch.bfloat16),
    Problem("float16", {"k": 4, "similarity": "cosine"}, BATCH, STANDARD, dtype=torch.float16),
]
