"""The attention layer against the same projections around its peers, on one device in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import ConvNNAttention
from convnn.functional import convnn
from convnn_lab.bench import peers, plain
from convnn_lab.bench.check import ERROR, check
from convnn_lab.bench.measure import Function, require_device
from convnn_lab.bench.op import dense
from convnn_lab.bench.report import Contender, Row, timed

# Those of the thesis's table first; what it trains with; and KVT attention's own.
NEIGHBOURS = (9, 8, 36, 100)


class Around(nn.Module):
    """The projections and the kernel of an attention layer around another operator on its heads."""

    def __init__(self, layer: ConvNNAttention, operator: Function) -> None:
        super().__init__()
        self.layer, self.operator = layer, operator

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values ``(B, H, N, d)``, and the kernel if there is one."""
        parts = self.layer.qkv(x).unflatten(-1, (3, self.layer.num_heads, -1))  # (B, N, 3, H, d)
        kernel = self.layer.kernel
        return [*parts.movedim(-2, -4).unbind(-2), *([] if kernel is None else [kernel.weight])]

    def forward(self, x: Tensor) -> Tensor:
        """``(B, N, dim)`` to ``(B, N, dim)``."""
        combined = self.operator(*self.heads(x))
        return self.layer.proj(combined.transpose(-2, -3).flatten(-2))


def attention(
    batch: int = 32, tokens: int = 197, dim: int = 768, heads: int = 12, neighbours: Sequence[int] = NEIGHBOURS
) -> Iterator[Row]:
    """The whole layer under bfloat16 autocast with all its gradients; checked before anything is timed."""
    require_device()
    x = torch.randn(batch, tokens, dim, device="cuda")
    for k in neighbours:
        case = f"{batch}, {tokens}, {dim}, {heads} heads, K={k}"
        layers = modules(dim, heads, k, device="cuda", every_dense=k == neighbours[0])
        for name in ("convnn", "convnn, no kernel"):
            check_layer(f"{case}, {name}", layers[name], x)
        torch.compiler.reset()  # torch compiles a function for so many sizes only
        for name, layer in layers.items():
            function = partial(autocast, layer)
            yield timed(case, Contender(name, function, [x], list(layer.parameters()), peer=isinstance(layer, Around)))


def modules(dim: int, heads: int, k: int, device: str, *, every_dense: bool = True) -> dict[str, nn.Module]:
    """Layers to compare, torch's attention first."""
    ours = ConvNNAttention(dim, heads, k=k, device=device)
    without = ConvNNAttention(dim, heads, k=k, kernel=None, device=device)
    if ours.kernel is not None:
        nn.init.normal_(ours.kernel.weight)  # at 1, where it starts, it would not matter who comes first
    found: dict[str, nn.Module] = {
        "sdpa": Around(without, F.scaled_dot_product_attention),
        "convnn": ours,
        "convnn, no kernel": without,
        "plain": Around(ours, partial(plain.convnn, k=k)),
        "kvt, masked": Around(without, partial(plain.kvt, k=k)),
        "kvt, flex": Around(without, peers.flex_kvt(k)),
    }
    if every_dense:
        found |= {name: Around(without, function) for name, function in dense(few=True).items()}
    return found


def autocast(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer in bfloat16."""
    with torch.autocast(x.device.type, torch.bfloat16):
        return layer(x)


def check_layer(case: str, layer: nn.Module, x: Tensor) -> None:
    """Check the operator on the layer's own heads, and the layer around it."""
    if not isinstance(layer, ConvNNAttention) or not isinstance(layer.k, int):
        raise TypeError(f"a ConvNNAttention with a number of neighbours is checked, got {layer}")
    around = Around(layer, partial(convnn, k=layer.k))
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        given = around.heads(x)
        output, again = layer(x), around(x)
    check(case, [tensor.to(given[0].dtype) for tensor in given], layer.k)
    error = ((output - again).norm() / again.norm()).item()
    if not error <= ERROR[output.dtype]:
        raise ValueError(f"{case}: the layer is off by {error:.1e} of its norm; nothing is timed")
