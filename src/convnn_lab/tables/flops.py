"""Floating point operations of a published model, counted twice: as the thesis did, and as they are.

The thesis counted with torch's profiler: two for every multiplication with addition of matrix products and of
convolutions with whole-number padding, one for every number multiplied or added where that makes a new tensor. It saw
no 1-D convolution (the whole aggregation of ConvNN) and no convolution with ``padding="same"``. The true count has all
matrix products and convolutions and nothing else. Both are of the architecture as it was run, whose search compares
all cells of the padded map.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from convnn import ConvNN2d, ConvNNAttention, LinearAttention
from convnn.candidates import Grid
from convnn.layers.windows import Windows
from convnn.models import GPT
from convnn.models.vit import Block, ViT


class Flops(NamedTuple):
    """How many operations one image takes.

    Args:
        thesis: in the thesis's count.
        true: two for every multiplication with addition.
    """

    thesis: int = 0
    true: int = 0


def count(model: nn.Module, image: int, *, fused: bool = False, published: bool = True) -> Flops:
    """Count the operations of a model on the meta device, for one image.

    Args:
        fused: the aggregation of ConvNN attention is one kernel, of which the thesis's count sees nothing.
        published: count a search as it was run, over all cells of the padded map and in padded windows; otherwise
            as the layer is defined.
    """
    counted: list[Flops] = []
    hooks = []
    for module in _counted_alone(model):
        rule = next(rule for kind, rule in RULES.items() if isinstance(module, kind))

        def hook(module: Any, inputs: tuple[Tensor, ...], output: Tensor, rule: Any = rule) -> None:
            counted.append(rule(module, inputs[0], output, published=published))

        hooks.append(module.register_forward_hook(hook))
    searches = [module for module in model.modules() if isinstance(module, (ConvNN2d, ConvNNAttention))]
    try:
        for search in searches:
            search.forward = partial(_shaped, search)  # type: ignore[method-assign]
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
            model(example(model, image))
    finally:
        for each in hooks:
            each.remove()
        for search in searches:
            del search.forward
    thesis, true = (sum(column) for column in zip(*counted, strict=True))
    return Flops(thesis - sum(_weighed(search, image) for search in searches) if fused else thesis, true)


def _shaped(module: ConvNN2d | ConvNNAttention, x: Tensor, **_: Any) -> Tensor:
    """What a search gives, without searching."""
    if isinstance(module, ConvNNAttention):
        return x.new_empty(*x.shape[:-1], module.proj.out_features)
    size = [n // module.patch for n in x.shape[2:]]
    windows = Windows(tuple(size), module.kernel_size, module.stride, module.dilation, module.ends)
    return x.new_empty(x.shape[0], module.out_channels, *(n * module.patch for n in windows.outputs))


def example(model: nn.Module, size: int, device: str = "meta") -> Tensor:
    """Something for a model to look at: an image of so many cells to a side, or a text of so many tokens."""
    if isinstance(model, GPT):
        return torch.zeros(1, size, dtype=torch.int64, device=device)
    channels = next(m.in_channels for m in model.modules() if isinstance(m, (nn.Conv2d, ConvNN2d)))
    return torch.rand(1, channels, size, size, device=device)


def _weighed(module: nn.Module, image: int) -> int:
    """The neighbours times their weights, in an attention on patches of 16."""
    if not isinstance(module, ConvNNAttention) or module.kernel is None:
        return 0
    return ((image // 16) ** 2 + 1) * module.kernel.weight.shape[-1] * module.v_dim


def _counted_alone(module: nn.Module) -> Iterator[nn.Module]:
    """The modules with a rule; what is inside a search is counted with it."""
    if isinstance(module, tuple(RULES)):
        yield module
    if not isinstance(module, (ConvNN2d, ConvNNAttention, LinearAttention)):
        for child in module.children():
            yield from _counted_alone(child)


def _convolution(module: nn.Conv2d, x: Tensor, y: Tensor, *, published: bool = True) -> Flops:  # noqa: ARG001
    macs = y.numel() * module.weight[0].numel()
    return Flops(0 if isinstance(module.padding, str) else 2 * macs, 2 * macs)


def _linear(module: nn.Linear, x: Tensor, y: Tensor, *, published: bool = True) -> Flops:  # noqa: ARG001
    macs = y.numel() * module.in_features
    return Flops(2 * macs, 2 * macs)


def _search(module: ConvNN2d, x: Tensor, y: Tensor, *, published: bool = True) -> Flops:
    patch = module.patch
    channels = module.in_channels * patch**2
    ends = [sum(end) if module.include_padding else 0 for end in module.ends]
    cells = prod(n // patch + end for n, end in zip(x.shape[2:], ends, strict=True))
    positioned = module.position is not None
    compared = channels + 2 * positioned
    combined = 2 * y.numel() * module.weight[0].numel()
    if not module.by_features:
        return Flops(combined, combined)
    asked = cells if module.candidates is None else module.candidates.count  # type: ignore[attr-defined]
    keys = min(asked, cells)
    asking = cells if published else y.numel() // (module.out_channels * patch**2)
    scores = 2 * asking * keys * compared
    # Where a grid stands was computed too: a product and a sum for each of its cells.
    numbered = 2 * keys if isinstance(module.candidates, Grid) and keys < cells else 0
    scaled = cells * compared if positioned else 0  # the share of features and the share of coordinates
    return Flops(scores + numbered + scaled, scores + combined)


def _attention(module: ConvNNAttention, x: Tensor, y: Tensor, *, published: bool = True) -> Flops:
    n, d, heads = x.shape[-2], module.v_dim, module.num_heads
    keys = n if module.candidates is None else module.candidates.count  # type: ignore[attr-defined]
    projected = keys if module.subset == "before" else n
    projections = 2 * x.shape[-1] * (n * module.qk_dim + projected * module.qk_dim + n * module.v_dim)
    projections += 2 * module.v_dim * y.numel()
    scores = 2 * n * keys * module.qk_dim
    if module.kernel is not None:
        k = module.kernel.weight.shape[-1]
        combined = 2 * n * heads * module.kernel.weight[..., 0].numel() * k
        pointwise = 0 if module.kernel.pointwise is None else 2 * n * heads * module.kernel.pointwise.weight.numel()
        # Seen of the aggregation: the neighbours times their weights.
        return Flops(projections + scores + n * k * d, projections + scores + combined + pointwise)
    if module.position is not None and published:
        return _local(module, n, projections)
    whole = projections + scores + 2 * n * keys * d
    masked = 4 if module.mask.count else 0
    scaled = 1 if module.k != "all" else masked  # KVT scales its scores; the band makes four tensors of them
    return Flops(whole + scaled * n * n * heads, whole)


def _local(module: ConvNNAttention, n: int, projections: int) -> Flops:
    """Local attention as it was run: tokens padded to windows of 128, each looking at three of them."""
    window = 128
    padded = -(-n // window) * window
    scores = 2 * padded * 3 * window * module.qk_dim
    # What turning by place, scaling and masking made of new tensors, from the author's log.
    return Flops(projections + 2 * scores + 345_216, projections + 2 * scores)


def _sums(module: LinearAttention, x: Tensor, y: Tensor, *, published: bool = True) -> Flops:  # noqa: ARG001
    n, d = x.shape[-2:]
    macs = 4 * n * d * d + 2 * n * d * (d // module.num_heads + 1)
    return Flops(2 * macs, 2 * macs)


def _residuals(module: Block, x: Tensor, y: Tensor, *, published: bool = True) -> Flops:  # noqa: ARG001
    return Flops(2 * x.numel(), 0)


def _positions(module: ViT, x: Tensor, y: Tensor, *, published: bool = True) -> Flops:  # noqa: ARG001
    tokens = prod(side // module.patch for side in x.shape[-2:]) + 1
    return Flops(tokens * module.num_features, 0)


RULES: dict[type[nn.Module], Callable[..., Flops]] = {
    ConvNN2d: _search,
    ConvNNAttention: _attention,
    LinearAttention: _sums,
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    Block: _residuals,
    ViT: _positions,
}


def executed(model: nn.Module, image: int) -> int:
    """Count what this library computes for one image: matrix products and convolutions, and depthwise kernels.

    The search is the one that runs: a score for every window and key, and a second look at the chosen pairs. There is
    no fused kernel yet; a row that was run with one is counted as it runs here.
    """
    searches = [module for module in model.modules() if isinstance(module, (ConvNN2d, ConvNNAttention))]
    shapes: list[tuple[Any, torch.Size]] = []

    def noted(module: Any, x: Tensor, **_: Any) -> Tensor:
        shapes.append((module, x.shape))
        return _shaped(module, x)

    try:
        for search in searches:
            search.forward = partial(noted, search)  # type: ignore[method-assign]
        total = _run(model, example(model, image))
    finally:
        for search in searches:
            del search.forward
    seen: dict[str, int] = {}
    for layer, shape in shapes:
        # Layers alike cost alike, and searching on the meta device takes its time.
        key = f"{layer} {[tuple(p.shape) for p in layer.parameters()]} {layer.candidates} {shape}"
        if key not in seen:
            seen[key] = _run(layer, torch.empty(shape, device="meta")) + _by_channel(layer, shape)
        total += seen[key]
    return total


def _run(module: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), warnings.catch_warnings(), FlopCounterMode(display=False) as counter:
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
        module(x)
    return counter.get_total_flops()


def _by_channel(module: nn.Module, shape: torch.Size) -> int:
    """Products by element, which no counter of matrix products sees."""
    if not isinstance(module, ConvNNAttention) or module.kernel is None or module.kernel.kind == "standard":
        return 0
    return 2 * shape[-2] * module.v_dim * module.kernel.weight.shape[-1]
