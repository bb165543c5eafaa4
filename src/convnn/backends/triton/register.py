"""Operators of torch, made so that their first call does not import torch's compiler, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.function import once_differentiable

LIBRARY = torch.library.Library("convnn", "DEF")
PLAIN = (Tensor, nn.Parameter)


class Operator:
    """A function of tensors as an operator of torch: one that changes no argument, on CUDA devices and interpreted."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function, self.__doc__ = f"convnn::{name}", function, function.__doc__
        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=torch.Tag.pt2_compliant_tag)
        for device in ("CPU", "CUDA"):
            LIBRARY.impl(name, function, device)
        self.overload = getattr(torch.ops.convnn, name).default

    def __call__(self, *given: Any) -> Any:
        """Run it where its tensors are; as a function, where nobody would notice: torch takes longer to find it."""
        return (self.function if _unnoticed(given) else self.overload)(*given)

    def register_fake(self, function: Callable[..., Any]) -> None:
        """Say what shapes come out."""
        torch.library.register_fake(self.name, function, lib=LIBRARY)

    def register_autograd(self, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
        """Say what gradients are, and what is kept for them."""
        torch.library.register_autograd(self.name, backward, setup_context=keep, lib=LIBRARY)
        self._eager = _function(self, backward, keep).apply

    def learned(self, *given: Any) -> Any:
        """Run it, with gradients if any are wanted; torch needs longer to find what is registered than kernels do."""
        return (self if torch.compiler.is_compiling() or not torch.is_grad_enabled() else self._eager)(*given)


def _unnoticed(given: Sequence[Any]) -> bool:
    """Whether an operator and its function are one and the same here: nothing traces, counts or learns."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or _autograd._profiler_enabled():
        return False
    if (
        torch._C._len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return False
    return all(type(each) in PLAIN for each in given if isinstance(each, Tensor))


def _function(run: Operator, gradients_of: Callable[..., Any], keep: Callable[..., None]) -> Any:
    """An operator and its gradients for eager mode."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run(*inputs)
            keep(ctx, inputs, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients_of(ctx, *gradients)

    return Eager


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Make a function the operator ``convnn::name``."""
    return lambda function: Operator(name, function)
