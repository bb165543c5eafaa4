"""The hybrid layer against torch's convolution and a slow definition of its search, followed by a 1x1 convolution."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import convnn
from convnn.backends import Backend
from convnn_lab.verify.convolutions import fitting
from convnn_lab.verify.drawing import Case, Problem, between, call, coin, each, numbers, one_of

HYBRIDS: tuple[Any, ...] = (convnn.HybridConv1d, convnn.HybridConv2d, convnn.HybridConv3d)
CONVOLUTIONS: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)


def hybrid(ratio: float | None) -> Case:
    """Make a case with this share of the search, or with any share."""

    def case() -> Problem:
        axes, branch = between(1, 3), one_of("standard", "depthwise")
        # Of one channel all cosines are 1 or -1, and who is nearest would depend on how ties are broken.
        inputs = between(3, 5)
        unit, parts = (1, between(2, 6)) if branch == "standard" else (inputs, between(2, 3))
        outputs = unit * parts
        searched = round(outputs * ratio) if ratio is not None else unit * between(1, parts - 1)
        window = _window(axes)
        options = {"ratio": searched / outputs, "branch": branch, "include_padding": coin(0.7), **window}
        # By dot product, unlike cosine, a cell need not be its own most similar one, and yet it comes first.
        options["similarity"] = one_of("cosine", "dot")
        size = fitting(axes, {**options, "padding": _padding(axes, options)})
        cells = torch.randn(between(1, 2), inputs, *size)
        most = prod(n + sum(end) for n, end in zip(size, _ends(axes, options), strict=True))
        options["k"] = None if coin() else between(1, min(most, 30))
        parameters = _parameters(axes, inputs // unit, searched, outputs, options)
        for name in ("conv", "convnn", "pointwise"):
            options[f"{name}_bias"] = f"{name}.bias" in parameters
        options["pointwise"] = "pointwise.weight" in parameters

        def ours(backend: str | Backend) -> Tensor:
            layer = HYBRIDS[axes - 1](inputs, outputs, **options, backend=backend)
            layer.load_state_dict(parameters)
            return layer(cells)

        said = call(f"HybridConv{axes}d", inputs, outputs, **options)
        return Problem(ours, lambda: _peer(cells, parameters, options), f"{said} on {tuple(cells.shape)}")

    return case


def _window(axes: int) -> dict[str, Any]:
    kernel = each(numbers(axes, 1, (7, 4, 3)[axes - 1]), axes)
    dilation, stride = (each(numbers(axes, 1, 2), axes) for _ in range(2))
    # With more padding than half a window a query could be a cell of padding: 0, and as near to all as to any.
    around = tuple(between(0, d * (r - 1) // 2) for d, r in zip(dilation, kernel, strict=True))
    return {
        "kernel_size": kernel,
        "stride": one_of(1, stride),
        "padding": one_of(None, around),
        "dilation": dilation,
        "padding_mode": one_of("zeros", "zeros", "reflect", "replicate", "circular"),
    }


def _parameters(axes: int, per_group: int, searched: int, outputs: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Draw the parameters, as the layer names them; some without a bias."""
    kernel, k = options["kernel_size"], options["k"]
    taps = kernel if k in (None, prod(kernel)) else (k,)
    shapes = {"convnn": (searched, per_group, *taps), "conv": (outputs - searched, per_group, *kernel)}
    shapes |= {"pointwise": (outputs, outputs, *(1,) * axes)} if coin(0.8) else {}
    drawn = {}
    for name, shape in shapes.items():
        if shape[0]:
            drawn[f"{name}.weight"] = torch.randn(shape) / prod(shape[1:]) ** 0.5
            drawn |= {f"{name}.bias": torch.randn(shape[0])} if coin(0.8) else {}
    return drawn


def _padding(axes: int, options: dict[str, Any]) -> Any:
    """What a padding of None stands for."""
    if options["padding"] is not None:
        return options["padding"]
    if set(each(options["stride"], axes)) == {1}:
        return "same"
    return tuple(d * (r - 1) // 2 for d, r in zip(options["dilation"], options["kernel_size"], strict=True))


def _ends(axes: int, options: dict[str, Any]) -> list[tuple[int, int]]:
    """The padding before and after, along every axis."""
    padding = _padding(axes, options)
    if padding != "same":
        return [(amount, amount) for amount in padding]
    reaches = [d * (r - 1) for d, r in zip(options["dilation"], options["kernel_size"], strict=True)]
    return [(reach // 2, reach - reach // 2) for reach in reaches]


def _peer(cells: Tensor, parameters: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    axes, get = cells.ndim - 2, parameters.get
    ends, convolution = _ends(axes, options), CONVOLUTIONS[axes - 1]
    mode = options["padding_mode"].replace("zeros", "constant")
    padded = F.pad(cells, [amount for end in reversed(ends) for amount in end], mode=mode)
    parts = []
    if "convnn.weight" in parameters:
        parts.append(_nearest(padded, Map(tuple(cells.shape[2:]), ends, options), parameters["convnn.weight"]))
        if "convnn.bias" in parameters:
            parts[0] = parts[0] + parameters["convnn.bias"].reshape(-1, *(1,) * axes)
    if "conv.weight" in parameters:
        weight = parameters["conv.weight"]
        groups = cells.shape[1] // weight.shape[1]
        parts.append(convolution(padded, weight, get("conv.bias"), options["stride"], 0, options["dilation"], groups))
    output = torch.cat(parts, 1)
    return convolution(output, get("pointwise.weight"), get("pointwise.bias")) if options["pointwise"] else output


class Map(NamedTuple):
    """A padded map and the windows on it."""

    size: tuple[int, ...]
    ends: list[tuple[int, int]]
    options: dict[str, Any]

    def cells(self) -> list[tuple[int, ...]]:
        """The places of all cells, padding included."""
        return list(product(*(range(n + sum(end)) for n, end in zip(self.size, self.ends, strict=True))))

    def inside(self, cell: tuple[int, ...]) -> bool:
        """Whether it is no padding."""
        sides = zip(cell, self.size, self.ends, strict=True)
        return all(before <= place < before + n for place, n, (before, _) in sides)

    def middles(self) -> list[range]:
        """The middles of the windows, or the cell before, along every axis."""
        given = zip(self.size, self.ends, self.options["kernel_size"], self.options["dilation"], strict=True)
        reaches = [(n + sum(end), d * (r - 1)) for n, end, r, d in given]
        strides = each(self.options["stride"], len(self.size))
        return [range(r // 2, n - r + r // 2, s) for (n, r), s in zip(reaches, strides, strict=True)]


def _nearest(padded: Tensor, on: Map, weight: Tensor) -> Tensor:
    """Compare on the padded map: oneself first, then the k - 1 most alike, each slot with its part of the kernel."""
    cells, middles = on.cells(), on.middles()
    queries = [cells.index(middle) for middle in product(*middles)]
    tokens = padded.flatten(2).mT  # (B, M, C)
    pairs = tokens[:, queries, None], tokens[:, None]
    by_angle = on.options["similarity"] == "cosine"
    alike = F.cosine_similarity(*pairs, dim=-1) if by_angle else (pairs[0] * pairs[1]).sum(-1)  # (B, N, M)
    if not on.options["include_padding"]:
        alike[..., [not on.inside(cell) for cell in cells]] = -torch.inf
    alike[:, range(len(queries)), queries] = torch.inf
    taps = weight.flatten(2)  # (O, C/groups, k)
    scores, index = (ranked[..., : taps.shape[-1]] for ranked in alike.sort(dim=-1, descending=True))
    taken = torch.stack([rows[chosen] for rows, chosen in zip(tokens, index, strict=True)])  # (B, N, k, C)
    taken = taken * (scores > -torch.inf)[..., None]
    groups = tokens.shape[-1] // taps.shape[1]
    output = torch.einsum(
        "bnkgc,gock->bgon", taken.unflatten(-1, (groups, -1)), taps.unflatten(0, (groups, -1))
    )  # (B, G, O/G, N)
    return output.flatten(1, 2).unflatten(2, tuple(map(len, middles)))
