"""What the operator requires of its inputs; each error says what is required and what came."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from convnn.neighbors import Neighbors, together

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tensors(**named: Tensor) -> None:
    """Require floating point tensors on one device."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
    same_device(**named)


def same_device(**named: Tensor) -> None:
    """Require one device."""
    if len({tensor.device for tensor in named.values()}) > 1:
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in named.items())
        raise ValueError(f"all tensors must be on one device, got {devices}")


def same_dtype(**named: Tensor) -> None:
    """Require one type."""
    given = {name: tensor.dtype for name, tensor in named.items()}
    if len(set(given.values())) > 1:
        came = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise ValueError(f"{' and '.join(given)} must have the same type, got {came}")


def rows(name: str, tensor: Tensor, shape: str) -> None:
    """Require at least two dimensions."""
    if tensor.ndim < 2:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")


def compared(query: Tensor, key: Tensor) -> None:
    """Require queries and keys that can be compared."""
    tensors(query=query, key=key)
    rows("query", query, "(..., N, E)")
    rows("key", key, "(..., M, E)")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have as many channels, got {query.shape[-1]} and {key.shape[-1]}")
    if query.shape[-1] == 0:
        raise ValueError("query and key must have at least one channel to compare, got 0")
    if key.shape[-2] == 0:
        raise ValueError(f"there must be at least one key, got a key of shape {tuple(key.shape)}")


def leading(**named: Tensor) -> torch.Size:
    """Require leading dimensions that broadcast."""
    try:
        return together(*(tensor.shape[:-2] for tensor in named.values()))
    except RuntimeError:
        came = ", ".join(f"{name} {tuple(tensor.shape[:-2])}" for name, tensor in named.items())
        raise ValueError(f"leading dimensions must broadcast, got {came}") from None


def neighbor_count(k: int | Literal["all"], n_keys: int, *, has_kernel: bool = False, among: str = "keys") -> int:
    """Require a k from 1 to the number of keys, or ``"all"`` where there is no kernel."""
    if isinstance(k, str):
        if k != "all":
            raise ValueError(f"k must be an integer or 'all', got {k!r}")
        if has_kernel:
            raise ValueError("k='all' takes no kernel: a kernel has a size; give k as that number")
        return n_keys
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt, Integral)):
        raise ValueError(f"k must be an integer or 'all', got {k!r} of type {type(k).__name__}")
    if not 1 <= k <= n_keys:
        raise ValueError(f"k must be from 1 to the number of {among}, {n_keys}, got {k}")
    return k


def mask_tensor(mask: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """Require a bool or floating point mask that broadcasts to ``(..., N, M)``; give it two dimensions at least."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"a mask must be bool (True may be chosen) or floating point (added), got {mask.dtype}")
    whole = mask if mask.ndim >= 2 else mask.expand(1, *mask.shape or (1,))
    if whole.shape[-2] not in (1, n_queries) or whole.shape[-1] not in (1, n_keys):
        raise ValueError(f"a mask must broadcast to (..., {n_queries}, {n_keys}), got {tuple(mask.shape)}")
    return whole


def places(name: str, index: Tensor, shape: str, n_keys: int, *, every: bool = False) -> None:
    """Require whole numbers below M; a negative one is no key, unless every one must be."""
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(index).__name__}")
    if index.dtype != torch.int64 or index.ndim < 1 or (every and index.ndim > 1):
        came = f"{tuple(index.shape)} of {index.dtype}"
        raise ValueError(f"{name} must have shape {shape} and type torch.int64, got {came}")
    # On other devices, and where there are no numbers yet, looking would wait or fail; torch's own gather looks there.
    if is_concrete(index) and index.numel() and int(index.max()) >= n_keys:
        raise ValueError(f"{name} must be below the number of keys, {n_keys}, got {int(index.max())}")
    if every and is_concrete(index) and index.numel() and int(index.min()) < 0:
        raise ValueError(f"{name} must not be negative, got {int(index.min())}")


def stop_beyond(name: str, index: Tensor, n_keys: int) -> None:
    """Have a CUDA device stop at a number that is not below M, before a kernel of ours reads out of bounds.

    Looking would wait for the device. So the device looks, and stops as it does in torch's own indexing.
    """
    if index.device.type == "cuda":
        below = index < n_keys
        torch._assert_async(below.all() if below.ndim else below, f"{name} must be below the number of keys")


def is_concrete(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be looked at without waiting for them or breaking a trace."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and type(tensor) is Tensor


def is_transformed() -> bool:
    """Whether a torch.func transform is at work; under torch.compile this cannot be asked."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def combined(value: Tensor, k: int, kernel: Tensor | None, bias: Tensor | None) -> None:
    """Require values, kernel and bias that fit together."""
    rows("value", value, "(..., M, C)")
    channels = value.shape[-1]
    if kernel is not None:
        if kernel.ndim != 3 or kernel.shape[1] == 0:
            raise ValueError(f"kernel must have shape (O, C/groups, K), got {tuple(kernel.shape)}")
        out, per_group, taps = kernel.shape
        if taps != k:
            raise ValueError(f"kernel must have as many taps as there are neighbours, {k}, got {taps}")
        if channels % per_group:
            raise ValueError(f"kernel takes {per_group} channels per group, which does not divide the {channels} given")
        if channels == 0 or out % (channels // per_group):
            raise ValueError(f"kernel has {out} outputs, which its {channels // per_group} groups do not divide")
        channels = out
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias must have shape ({channels},), one per output channel, got {tuple(bias.shape)}")


def neighbors(value: Tensor, found: Neighbors) -> None:
    """Require the record that a search returns."""
    scores, index = found
    tensors(value=value, scores=scores)
    if scores.shape != index.shape or scores.ndim < 2:
        came = f"scores {tuple(scores.shape)} and index {tuple(index.shape)}"
        raise ValueError(f"neighbors must hold scores and index of one shape (..., N, K), got {came}")
    if index.dtype != torch.int64:
        raise ValueError(f"neighbors.index must be of type torch.int64, got {index.dtype}")
    same_device(value=value, scores=scores, index=index)
    leading(value=value, index=index)
    places("neighbors.index", index, "(..., N, K)", value.shape[-2])


def probability(dropout_p: float) -> None:
    """Require a probability."""
    if not isinstance(dropout_p, (int, float)) or not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be a number from 0 to 1, got {dropout_p!r}")


def whole(name: str, number: int, least: int) -> None:
    """Require a whole number that is large enough."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt, Integral)) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {number!r}")


def one_of(name: str, choice: Any, known: tuple[str, ...]) -> None:
    """Require one of the known words."""
    if choice not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {choice!r}")
