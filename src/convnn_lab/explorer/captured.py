"""What the layers of a model compare while it sees a picture.

A layer of this library is given a backend that notes every search and passes it on; attention of timm's kind shows its
queries and keys where they are normalised; a convolution is a search in space among the cells of its padded map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn.backends import Backend, choose
from convnn.layers import shapes
from convnn.layers.attention import ConvNNAttention
from convnn.layers.hybrid import HybridConvNd
from convnn.layers.maps import PADDINGS, ConvNNNd
from convnn.layers.multihead import MultiheadConvNN
from convnn.layers.windows import Windows
from convnn.search import Search
from convnn_lab.explorer import said
from convnn_lab.explorer.layer import Choices, Layer
from convnn_lab.explorer.places import Map
from convnn_lab.explorer.thinned import thinned

KNOWN = "ConvNNAttention, MultiheadConvNN, ConvNN2d, HybridConv2d, Conv2d and attention with qkv, q_norm and k_norm"
Seen: TypeAlias = Callable[[Layer], None]


def layers(model: nn.Module, image: Tensor, wanted: tuple[str, ...] = (), cells: int = 3136) -> list[Layer]:
    """Run a model on one picture ``(1, C, H, W)``; the layers it has, in the order they run.

    Plain convolutions are shown where there is nothing else to show, or where ``wanted`` names them.

    Args:
        wanted: every layer whose name contains one of these words is shown.
        cells: of a map with more cells, every so many-th is kept.

    Example:
        >>> from convnn import models
        >>> model = models.create("vit_tiny", layer="convnn", k=5, image_size=32).eval()
        >>> [(each.name, each.heads, each.own.k) for each in layers(model, torch.zeros(1, 3, 32, 32))][:2]
        [('blocks.0.attn', 3, 5), ('blocks.1.attn', 3, 5)]
    """
    found = dict(_known("", model))
    if wanted:
        chosen = {name: module for name, module in found.items() if any(word in name for word in wanted)}
    else:
        chosen = {name: module for name, module in found.items() if _kind(module) != "conv"} or found
    seen: list[Layer] = []
    about = (tuple(image.shape[-2:]), getattr(model, "num_prefix_tokens", None))
    with ExitStack() as stack, torch.no_grad():
        for name, module in chosen.items():
            stack.enter_context(WATCHED[str(_kind(module))](name or "model", module, seen.append, about))
        model(image)
    if not seen:
        asked = f" named {' or '.join(wanted)}" if wanted else ""
        raise ValueError(f"found no layer to look at{asked}; there are {', '.join(found) or f'none of {KNOWN}'}")
    return [thinned(layer, cells) for layer in seen]


def _known(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers inside a module that can be looked at; of a hybrid the branch that searches, if there is one."""
    if _kind(module) is not None:
        yield name, module
        return
    if isinstance(module, HybridConvNd):
        part = "conv" if module.convnn is None else "convnn"
        yield from _known(f"{name}.{part}", getattr(module, part))
        return
    for child, inner in module.named_children():
        yield from _known(f"{name}.{child}" if name else child, inner)


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, (ConvNNAttention, MultiheadConvNN)):
        return "tokens"
    if isinstance(module, ConvNNNd):
        return None if module.axes != 2 else "conv" if module.is_convolution else "map"
    if isinstance(module, nn.Conv2d):
        pairs = list(zip(module.stride, module.kernel_size, strict=True))
        return "conv" if any(size > step for step, size in pairs) else None
    normed = all(isinstance(getattr(module, part, None), nn.Module) for part in ("qkv", "q_norm", "k_norm"))
    return "attention" if normed else None


@contextmanager
def _tokens(name: str, module: Any, seen: Seen, about: Any) -> Iterator[None]:
    """A search among tokens."""

    def note(search: Search, _: Tensor | None) -> None:
        if search.query.shape[-2] != search.key.shape[-2]:
            came = f"{search.query.shape[-2]} queries and {search.key.shape[-2]} keys"
            raise ValueError(f"{name} attends to other tokens than its own, which no picture shows: {came}")
        seen(said.layer(name, module, search, _grid(search.query, *about)))

    with _searching(module, note):
        yield


@contextmanager
def _on_map(name: str, module: ConvNNNd, seen: Seen, about: Any) -> Iterator[None]:  # noqa: ARG001
    """A search among the cells of a map."""
    sizes: list[tuple[int, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, given: sizes.append(tuple(given[0].shape[-2:])))

    def note(search: Search, value: Tensor | None) -> None:
        size = tuple(side // module.patch for side in sizes[-1])
        shifted = module.boundary == "shift"
        windows = Windows(size, module.kernel_size, module.stride, module.dilation, module.ends, shifted)
        seen(said.layer(name, module, search, _windows(windows), value))

    with _searching(module, note):
        yield
    hook.remove()


@contextmanager
def _searching(module: Any, note: Callable[[Search, Tensor | None], None]) -> Iterator[None]:
    """Let a layer's searches be seen: a backend that notes them and hands them to the layer's own."""
    kept = module.backend

    def select(search: Search) -> Any:
        note(search, None)
        return choose(kept, search).backend.select(search)

    def aggregate(value: Tensor, index: Tensor, weights: Tensor, kernel: Tensor | None) -> Tensor:
        return choose(kept, None, value, kernel).backend.aggregate(value, index, weights, kernel)

    def fused(search: Search, value: Tensor, kernel: Tensor | None, weigh: Any) -> Tensor:
        note(search, value)
        return choose(kept, search, value, kernel).backend.run(search, value, kernel, weigh)

    module.backend = Backend(select, aggregate, lambda *_: None, fused, about="notes what is searched")
    try:
        yield
    finally:
        module.backend = kept


@contextmanager
def _convolution(name: str, module: Any, seen: Seen, about: Any) -> Iterator[None]:  # noqa: ARG001
    """A convolution: the cells of its padded map, and the window as nearest in space."""

    def note(_: Any, given: tuple[Tensor, ...]) -> None:
        cells = given[0][:1].detach().float().cpu()
        ends = shapes.ends(module.padding, module.kernel_size, module.stride, module.dilation)
        windows = Windows(tuple(cells.shape[-2:]), module.kernel_size, module.stride, module.dilation, ends)
        amounts = [amount for end in reversed(ends) for amount in end]
        padded = F.pad(cells, amounts, mode=PADDINGS[module.padding_mode])
        dilated = any(step > 1 for step in module.dilation)
        notes = ("is dilated; shown among all cells",) if dilated else ()
        taps = module.kernel_size[0] * module.kernel_size[1]
        own = Choices(k=taps, share=0.0, space="window")
        seen(Layer(name, type(module).__name__, _windows(windows), padded.flatten(2).mT, own=own, notes=notes))

    hook = module.register_forward_pre_hook(note)
    yield
    hook.remove()


@contextmanager
def _attention(name: str, module: Any, seen: Seen, about: Any) -> Iterator[None]:
    """Attention of timm's kind: queries and keys ``(B, H, N, d)`` as they leave their norms."""
    parts: dict[str, Tensor] = {}

    def note(*_: Any) -> None:
        query, key = (parts[part][0].detach().float().cpu() for part in ("q_norm", "k_norm"))
        own = Choices(k="all", similarity="scaled_dot", weighting="softmax")
        seen(Layer(name, type(module).__name__, _grid(query, *about), key, query, own))

    def keep(part: str) -> Any:
        return getattr(module, part).register_forward_hook(lambda _, given, out: parts.update({part: out}))  # noqa: ARG005

    hooks = [keep("q_norm"), keep("k_norm"), module.register_forward_hook(note)]
    yield
    for hook in hooks:
        hook.remove()


WATCHED: dict[str, Any] = {"tokens": _tokens, "map": _on_map, "conv": _convolution, "attention": _attention}


def _grid(query: Tensor, image: tuple[int, int], before: int | None) -> Map:
    """Tokens as the cells of a map with the picture's proportions, behind as few class tokens as there can be."""
    count = query.shape[-2]
    for first in range(16) if before is None else (before,):
        rows = round(((count - first) * image[0] / image[1]) ** 0.5) if count > first else 0
        if rows and (count - first) % rows == 0 and rows * image[1] == (count - first) // rows * image[0]:
            return Map.whole(rows, (count - first) // rows, first)
    raise ValueError(f"{count} tokens are no map of the proportions of a picture of {image[0]} by {image[1]}")


def _windows(windows: Windows) -> Map:
    """Where on the picture the windows of a map lie."""
    here = torch.device("cpu")
    (top, _), (left, _) = windows.padding
    starts = windows.starts(here)
    rows, columns = ((start + reach / 2).tolist() for start, reach in zip(starts, windows.reach, strict=True))
    own = windows.queries(here).reshape(windows.outputs)
    down, across = own[:, 0] // windows.padded[1], own[0] % windows.padded[1]
    return Map(
        cells=(windows.padded[0], windows.padded[1]),
        inner=(top, left, windows.size[0], windows.size[1]),
        rows=tuple(rows),
        columns=tuple(columns),
        own_rows=tuple(down.tolist()),
        own_columns=tuple(across.tolist()),
        kernel=(windows.kernel[0], windows.kernel[1]),
        dilation=(windows.dilation[0], windows.dilation[1]),
    )
