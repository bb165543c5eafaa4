"""What attentions of other libraries become: their projections, and the operator between them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import checks, functional
from convnn.backends import Backend
from convnn.candidates import Candidates, Cells
from convnn.layers import ConvNNAttention, MultiheadConvNN, shapes
from convnn.layers.kernel import Kernel, Kind, with_weights
from convnn.masks import Mask
from convnn.names import resolve
from convnn.search import SelfScore
from convnn.similarity import SIMILARITIES, Similarity, scaled_dot
from convnn.surgery import Refused
from convnn.weighting import WEIGHTINGS, Weigh, Weighting

# What a rule may say of an attention that keeps its own projections.
OPTIONS = (
    "k", "kernel", "shared_kernel", "kernel_init", "similarity", "weighting", "candidates", "self_score", "mask",
    "backend",
)  # fmt: skip


class Heads(nn.Module):
    """The operator between projections that are somebody else's.

    Args:
        channels: the channels of a head's values.
        heads: how many there are; only told apart where each has its own kernel.
        k: how many neighbours; where there are fewer keys, all of them, and slots that stay empty.
        kernel, shared_kernel, kernel_init, similarity, weighting, candidates, self_score, mask, backend: as in
            :class:`~convnn.ConvNNAttention`.

    Example:
        >>> query, key = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 9, 4)
        >>> output, _ = Heads(4, 3)(query, key, key)
        >>> torch.allclose(output, F.scaled_dot_product_attention(query, key, key), atol=1e-6)
        True
    """

    chooses_neighbours = True  # which convnn.morph looks for

    def __init__(
        self,
        channels: int,
        heads: int,
        *,
        k: int | Literal["all"] = "all",
        kernel: Kind | None = None,
        shared_kernel: bool = True,
        kernel_init: Literal["default", "preserving"] = "default",
        similarity: Similarity | str = "scaled_dot",
        weighting: Weighting | str = "softmax",
        candidates: Tensor | Candidates | None = None,
        self_score: SelfScore = "true",
        mask: Mask | str | Sequence[Mask | str] | None = None,
        backend: str | Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(k, str):
            checks.whole("k", k, 1)
        elif k != "all":
            raise ValueError(f"k must be a whole number or 'all', got {k!r}")
        elif kernel is not None:
            raise ValueError(f"a kernel has a size and k={k!r} has none: give k as a number, or kernel=None")
        checks.one_of("self_score", self_score, ("true", "one"))
        self.k, self.self_score, self.backend = k, self_score, backend
        self.similarity = resolve("similarity", similarity, SIMILARITIES)
        self.weighting = resolve("weighting", weighting, WEIGHTINGS)
        self.mask, self.candidates = shapes.Kept(mask, device), shapes.kept(candidates, device)
        started: dict[str, Any] = {"heads": None if shared_kernel else heads, "init": kernel_init}
        where = shapes.factory(device, dtype)
        self.kernel = None if kernel is None else Kernel(channels, k, kernel, **started, **where)  # type: ignore[arg-type]

    def extra_repr(self) -> str:  # noqa: D102
        return f"k={self.k}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: Sequence[Any] = (),
        *,
        scale: float | None = None,
        dropout_p: float = 0.0,
        own: bool = False,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: ``(..., H, N, d)`` and, where they are needed, the weights of all keys ``(..., H, N, M)``.

        Args:
            masks: as in the operator, beside the layer's own.
            scale: of the scaled dot product; None for one over the root of the channels.
            own: whether queries and keys are the same tokens, so that beside candidates each has itself.
        """
        if scale is not None and self.similarity is scaled_dot:
            query = query * (scale * query.shape[-1] ** 0.5)
        keys = key.shape[-2]
        if self.kernel is not None and keys < self.k:  # type: ignore[operator]
            key, value, masks = self._filled(key, value, masks)
        options = self._options(key, own) | {"mask": [*self.mask.all(), *masks] or None}
        if need_weights:
            weigh = Weigh(self.weighting, dropout_p)
            output, weights = with_weights(self.kernel, (query, key, value), weigh, **options)
            return output, weights[..., :keys]
        run = functional.convnn if self.kernel is None else self.kernel
        return run(query, key, value, weighting=self.weighting, dropout_p=dropout_p, **options), None

    def _filled(self, key: Tensor, value: Tensor, masks: Sequence[Any]) -> tuple[Tensor, Tensor, list[Any]]:
        """As many keys as the kernel has taps, those that are not there forbidden."""
        keys = key.shape[-2]
        more = (0, self.k - keys)  # type: ignore[operator]
        there = torch.arange(keys + more[1], device=key.device) < keys
        longer = [F.pad(mask, more) if isinstance(mask, Tensor) and mask.shape[-1] == keys else mask for mask in masks]
        return F.pad(key, (0, 0, *more)), F.pad(value, (0, 0, *more)), [*longer, there[None, :]]

    def _options(self, key: Tensor, own: bool) -> dict[str, Any]:
        keys = key.shape[-2]
        k = self.k if self.kernel is not None or isinstance(self.k, str) else min(self.k, keys)
        options: dict[str, Any] = {"k": k, "similarity": self.similarity, "backend": self.backend}
        if self.candidates is not None:
            options["candidates"] = self.candidates(key.shape[:-2], Cells((keys,)), key.device)
            if own:
                options |= {"self_index": torch.arange(keys, device=key.device), "self_score": self.self_score}
        return options


def options_of(layer: Any) -> dict[str, Any]:
    """What a rule's layer class says of the search; one that says more than that is refused."""
    if layer is None:
        return {"k": "all", "kernel": None}
    if not (isinstance(layer, type) and issubclass(layer, (ConvNNAttention, MultiheadConvNN))):
        name = getattr(layer, "__name__", repr(layer))
        raise Refused(f"an attention becomes ConvNNAttention or MultiheadConvNN, not {name}")
    base: Any = MultiheadConvNN if issubclass(layer, MultiheadConvNN) else ConvNNAttention
    said = {name: option for name, option in layer.given.items() if option is not None or name == "kernel"}
    other = sorted(set(said) - set(OPTIONS))
    if other:
        raise Refused(f"its projections stay as they are, so a rule cannot say {', '.join(other)}")
    defaults = inspect.signature(base).parameters
    options = {name: said.get(name, defaults[name].default) for name in ("k", "kernel")}
    if options["k"] is inspect.Parameter.empty:
        raise Refused("the rule must say k, as in ConvNNAttention.using(k=9)")
    # A kernel starts where it changes nothing, unless the rule says otherwise.
    start = {} if options["kernel"] is None else {"kernel_init": "preserving"}
    return {**start, **said, **options}


def noted(reason: str | None, dropout: float) -> str:
    """What to say of a twin: why it is not exact, and what its dropout does."""
    return "; ".join(filter(None, [reason, "its dropout draws other numbers" if dropout else None]))


def where_of(module: nn.Module) -> dict[str, Any]:
    """Where what a twin adds belongs: the device and the precision a module computes in, if its tensors say so."""
    tensors = [*module.parameters(), *module.buffers()]
    # Quantised weights are whole numbers, or floats of one byte: nothing to compute in.
    computing = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.element_size() > 1]
    device = next((tensor.device for tensor in tensors), None)
    return {"device": device, "dtype": computing[0].dtype if computing else None}


def adopted(module: nn.Module, cls: type[nn.Module]) -> Any:
    """An instance of a class with all a module has, itself and not copied, but for hooks, which are not its state."""
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    bookkeeping = set(made.__dict__)
    made.__dict__.update({name: value for name, value in module.__dict__.items() if name not in bookkeeping})
    for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        getattr(made, kind).update(getattr(module, kind))
    made.training = module.training
    return made
