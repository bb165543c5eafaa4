"""What the kernels count as under ``torch.utils.flop_counter``, which imports Triton and so is not imported before.

Import this module before a counter is made, if no kernel has run yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from convnn.backends.triton import few_ops, mix, ops, scored  # noqa: F401 - define the operators


@register_flop_formula(torch.ops.convnn.select)
def _flops_select(query: Any, key: Any, bias: Any, candidates: Any, *_: Any, **__: Any) -> int:
    batch, heads, n, channels = query
    width = key[-2] if candidates is None else candidates[-1]
    return 2 * batch * heads * n * width * channels


@register_flop_formula(torch.ops.convnn.combine)
def _flops_combine(query: Any, key: Any, value: Any, kernel: Any, index: Any, *_: Any, **__: Any) -> int:
    batch, heads, n, channels = query
    per_slot = 2 * channels + (3 if kernel is not None else 2) * value[-1]
    return batch * heads * n * index[-1] * per_slot


@register_flop_formula(torch.ops.convnn.combine_backward)
def _flops_backward(query: Any, key: Any, value: Any, kernel: Any, index: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops_combine(query, key, value, kernel, index)


@register_flop_formula(torch.ops.convnn.score)
def _flops_score(query: Any, key: Any, index: Any, *_: Any, **__: Any) -> int:
    return 2 * index[0] * index[1] * index[2] * index[3] * query[-1]


@register_flop_formula(torch.ops.convnn.score_backward)
def _flops_score_backward(query: Any, key: Any, index: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops_score(query, key, index)


@register_flop_formula(torch.ops.convnn.mix)
def _flops_mix(value: Any, index: Any, weights: Any, kernel: Any, *_: Any, **__: Any) -> int:
    rows, (outputs, channels, k) = index[0] * index[1] * index[2], kernel
    return 2 * rows * outputs * channels * k


@register_flop_formula(torch.ops.convnn.mix_backward)
def _flops_mix_backward(value: Any, index: Any, weights: Any, kernel: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops_mix(value, index, weights, kernel)


@register_flop_formula(torch.ops.convnn.attend_few)
def _flops_few(
    query: Any, key: Any, value: Any, kernel: Any, bias: Any, candidates: Any, mask: Any, shift: Any, beta: Any,
    k: int, *_: Any, **__: Any,
) -> int:  # fmt: skip
    per_slot = (3 if kernel is not None else 2) * value[-1]
    return _flops_select(query, key, bias, candidates) + query[0] * query[1] * query[2] * k * per_slot


@register_flop_formula(torch.ops.convnn.attend_few_backward)
def _flops_few_backward(
    query: Any, key: Any, value: Any, kernel: Any, candidates: Any, shift: Any, beta: Any, places: Any, lse: Any,
    gradient: Any, k: int, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return 2 * _flops_few(query, key, value, kernel, None, candidates, None, shift, beta, k)
