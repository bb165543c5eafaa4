"""Look inside a model while it runs: who chose whom, how near they were, and how much each counted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from convnn import checks, watching
from convnn.arguments import autocast_off
from convnn.layers.kernel import Kernel
from convnn.watching import Sight


@dataclass(frozen=True, eq=False)
class Call:
    """What one layer did in one forward pass.

    Args:
        layer: its name in the model; ``""`` where it is the model.
        forward: the number of the pass, from 0.
        keys: M, how many keys there were; of a map, the cells with their padding, row by row.
        heads: how many heads the dimension before the last two has, or None where it has none.
        index: who was chosen; -1 marks an empty slot.
        scores: how near they are, larger is nearer; ``-inf`` in an empty slot.
        weights: how much each counts, before dropout and before the learned kernel.

    Shape:
        index, scores and weights ``(..., N, K)``; leading dimensions are those the neighbours depend on, so that
        neighbours in space come without a batch.
    """

    layer: str
    forward: int
    keys: int
    heads: int | None
    index: Tensor
    scores: Tensor
    weights: Tensor

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (self.index, self.scores, self.weights))

    def __repr__(self) -> str:
        sizes = f"{tuple(self.index.shape)} of {self.keys} keys"
        return f"Call({self.layer!r}, forward={self.forward}, {sizes})"


class Record(Mapping[str, list[Call]]):
    """The calls :func:`record` saw, by the names of layers; ``calls`` has them in the order in which they ran."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.forwards = 0

    @property
    def nbytes(self) -> int:
        """The bytes of everything that is kept."""
        return sum(call.nbytes for call in self.calls)

    def __getitem__(self, name: str) -> list[Call]:
        found = [call for call in self.calls if call.layer == name]
        if not found:
            raise KeyError(
                f"no call of {name!r} was seen; of {', '.join(map(repr, self)) or 'nothing'} there were some"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(call.layer for call in self.calls))

    def __len__(self) -> int:
        return len({call.layer for call in self.calls})

    def __repr__(self) -> str:
        return f"Record({len(self.calls)} calls of {len(self)} layers in {self.forwards} passes, {self.nbytes:,} bytes)"


@contextmanager
def record(
    model: nn.Module,
    *,
    layers: Sequence[str] | None = None,
    keep: Literal["all", "last"] = "all",
    max_bytes: int = 2**30,
    device: torch.device | str | None = None,
    detach: bool = True,
) -> Iterator[Record]:
    """Inside the block, keep the neighbours, scores and weights of every layer of a model that searches for some.

    Outputs are what they are without it, bit by bit, on every backend: what a fused kernel does not keep is searched
    for once more. The model itself is not touched. One that is compiled runs without its compiled code in here. What
    backward computes again is not recorded again.

    Args:
        layers: names of modules to look into, with everything in them; None for all.
        keep: the calls of all passes, or of the last one. A pass is a call of the model, or of a part of it.
        max_bytes: how much to keep at most; the call that would not fit raises before anything is made for it.
        device: where to keep it; None for where it is made.
        detach: whether what is kept is cut off from the graph; otherwise gradients flow through scores and weights.

    Example:
        >>> from convnn import ConvNNAttention
        >>> model = nn.Sequential(nn.Linear(6, 8), ConvNNAttention(8, 2, k=3))
        >>> with record(model) as seen:
        ...     y = model(torch.randn(5, 10, 6))
        >>> seen["1"][0].index.shape
        torch.Size([5, 2, 10, 3])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"record looks into an nn.Module, got {type(model).__name__}")
    checks.one_of("keep", keep, ("all", "last"))
    checks.whole("max_bytes", max_bytes, 0)
    seen = Record()
    recorder = _Recorder(_named(model, layers), seen, keep == "last", max_bytes, device, detach)
    hooks = [
        register_module_forward_pre_hook(recorder.enter),
        register_module_forward_hook(recorder.leave, always_call=True),
    ]
    watched = watching.WATCHERS.set((*watching.WATCHERS.get(), recorder.look))
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # Its own call and that of what is inside are one place here.
            warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
            yield seen
    finally:
        watching.WATCHERS.reset(watched)
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, eq=False)
class _Place:
    name: str
    wanted: bool


class _Recorder:
    """Knows which module runs, and keeps what it shows."""

    def __init__(
        self, places: dict[nn.Module, _Place], seen: Record, last_only: bool, limit: int, device: Any, detach: bool
    ) -> None:
        self.places, self.seen, self.last_only, self.limit = places, seen, last_only, limit
        self.device, self.detach = device, detach
        self.running: list[nn.Module] = []

    def enter(self, module: nn.Module, _: Any) -> None:
        """A module begins."""
        if module not in self.places or not self._looks():
            return
        if not self.running:
            self.seen.forwards += 1
            if self.last_only:
                self.seen.calls.clear()
        self.running.append(module)

    def leave(self, module: nn.Module, _: Any, __: Any) -> None:
        """A module ends, well or not."""
        if self.running and self.running[-1] is module and self._looks():
            self.running.pop()

    def _looks(self) -> bool:
        """Whether it is this thread that is looked at."""
        return watching.anyone() and self.look in watching.WATCHERS.get()

    def look(self, sight: Sight) -> None:
        """The module that runs has called the operator."""
        if not self.running or not self.places[self.running[-1]].wanted:
            return
        name = self.places[self.running[-1]].name
        self._require_room(name, sight, 16 * prod(sight.shape))  # an index of 8 bytes, and twice float32
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            found = sight.find()
            if torch._C._functorch.is_functorch_wrapped_tensor(found.index):
                raise ValueError("record cannot look into a transform of torch.func, such as vmap")
            device = found.scores.device
            with autocast_off(device), _random_left_alone(device) if sight.weigh.may_be_random else nullcontext():
                weights = sight.weigh(found.scores, found.filled)
        tensors = [self._kept(tensor) for tensor in (found.index, found.scores, weights)]
        call = Call(name, self.seen.forwards - 1, sight.keys, _heads(self.running[-1]), *tensors)
        self._require_room(name, sight, call.nbytes)
        self.seen.calls.append(call)

    def _kept(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach() if self.detach else tensor
        return (tensor if self.device is None else tensor.to(self.device)).contiguous()

    def _require_room(self, name: str, sight: Sight, needed: int) -> None:
        held = self.seen.nbytes
        if held + needed > self.limit:
            said = f"{name or 'the model'} has neighbours {tuple(sight.shape)}, which take {needed:,} bytes beside the"
            what = (
                "give a larger max_bytes, fewer layers, a smaller batch, or keep='last' where there are several passes"
            )
            raise ValueError(f"{said} {held:,} recorded already, and max_bytes is {self.limit:,}: {what}")


def _named(model: nn.Module, layers: Sequence[str] | None) -> dict[nn.Module, _Place]:
    """Every module with its name; kernels go by the name of their layer, compiled modules by that of what is inside."""
    names = {module: _plain(name) for name, module in model.named_modules() if not isinstance(module, Kernel)}
    if isinstance(layers, str):
        raise TypeError(f"layers must be a sequence of names, got the string {layers!r}")
    for wanted in layers or ():
        if wanted not in names.values():
            raise ValueError(f"there is no module {wanted!r} in this {type(model).__name__}")
    return {module: _Place(name, _within(name, layers)) for module, name in names.items()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _within(name: str, layers: Sequence[str] | None) -> bool:
    return layers is None or any(name == each or name.startswith(f"{each}.") or not each for each in layers)


def _heads(module: nn.Module) -> int | None:
    heads = getattr(module, "num_heads", getattr(module, "heads", 1))
    # An attention has this dimension even with one head; a map has it only with several.
    return heads if hasattr(module, "num_heads") or heads > 1 else None


def _random_left_alone(device: torch.device) -> Any:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
