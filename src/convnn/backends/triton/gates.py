"""When the Triton backend may run, and why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from math import prod

import torch
from torch import Tensor

from convnn import checks
from convnn.backends import chunked, reference
from convnn.backends.record import Backend
from convnn.backends.triton import shapes
from convnn.search import Search

# More channels than this do not fit into a program.
CHANNELS = 2048
# More programs than this a grid does not hold along its second side.
ENTRIES = 65_535


def missing() -> str | None:
    """Why Triton cannot be imported here, or None."""
    return _missing()


missing._dynamo_marked_constant = True  # type: ignore[attr-defined] # as assume_constant_result, which imports a compiler


@cache
def _missing() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from convnn.backends.triton import backward, flops, launch, mix_grads, row_steps  # noqa: F401, PLC0415
    except Exception as error:  # whatever a broken installation raises
        return f"Triton cannot be imported: {error}"
    return None


def broken(index: int | None) -> str | None:
    """Why Triton cannot run a kernel on this CUDA device, or None; tried once, for a driver or compiler may be missing.

    While a CUDA graph is captured nothing may be tried, and it is taken to work.
    """
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return None if capturing else _tried(index)


@cache
def _tried(index: int | None) -> str | None:
    try:
        _try(index)
    except Exception as error:  # whatever a broken installation raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"Triton cannot run a kernel: {lines[0]}"
    return None


def _try(index: int | None) -> None:
    """Compile and launch the smallest kernel; nobody waits for its result."""
    from convnn.backends.triton.kernels.trial import trial  # noqa: PLC0415

    with torch.cuda.device(index):
        trial[(1,)](torch.empty(1, dtype=torch.int32, device="cuda"))


def declines(search: Search | None, value: Tensor | None, kernel: Tensor | None) -> str | None:  # noqa: ARG001, PLR0911
    """Say why not: another device or type, a transform, or no Triton that works."""
    searched = () if search is None else (search.query, search.key)
    tensors = [tensor for tensor in (*searched, value) if tensor is not None]
    device = _device(search, value)
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"its kernels run on CUDA devices, not on {device.type}"
    if any(tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) for tensor in tensors):
        return "its kernels compute in float32"
    if any(tensor.shape[-1] > CHANNELS for tensor in tensors):
        return f"its kernels hold at most {CHANNELS} channels"
    if search is not None and prod(shapes.lead_of(search)) > ENTRIES:
        return f"its kernels take at most {ENTRIES:,} searches at once"
    if any(count > shapes.REACH for count in _counts(search, value)):
        return f"its kernels count up to {shapes.REACH:,} within one search"
    if torch.compiler.is_compiling():
        return missing()  # what else may be wrong shows soon enough
    if checks.is_transformed():
        return "torch.func transforms do not reach into its kernels"
    return missing() or (broken(device.index) if device.type == "cuda" else None)


def _counts(search: Search | None, value: Tensor | None) -> Iterator[int]:
    """How many numbers a search has, its result and its slots."""
    for tensor in () if search is None else (search.query, search.key):
        yield tensor.shape[-2] * tensor.shape[-1]
    if value is not None:
        yield value.shape[-2] * value.shape[-1]
    if search is not None:
        slots = 1 if search.everything else search.k
        yield search.query.shape[-2] * max(slots, 1 if value is None else value.shape[-1])


def waits(search: Search | None, value: Tensor | None, kernel: Tensor | None) -> str | None:  # noqa: ARG001
    """Leave the CPU, where Triton at best interprets its kernels, and what is exported to those who ask by name."""
    device = _device(search, value).type
    if device != "cuda":
        return f"its kernels run on CUDA devices, not on {device}"
    if torch.compiler._is_exporting_flag:
        return "what is exported with its kernels runs only beside this package; ask for it by name"
    return None


def otherwise() -> Backend:
    """Who does what the kernels do not know: chunked, or the reference where sizes must stay symbolic."""
    return reference.BACKEND if torch.compiler._is_exporting_flag else chunked.BACKEND


def _device(search: Search | None, value: Tensor | None) -> torch.device:
    tensor = value if search is None else search.query
    return torch.device("meta") if tensor is None else tensor.device
