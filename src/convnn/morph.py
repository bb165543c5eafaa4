"""Move a model along the spectrum: how many neighbours, the share of space and features, how sharply it chooses.

A schedule is a function of the time in epochs, a number that grows within an epoch too; what it says depends on the
time and on nothing else, so that whoever stops can go on anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn

from convnn import checks
from convnn.blend import Blend
from convnn.layers import ConvNNAttention, MultiheadConvNN
from convnn.layers.maps import ConvNNNd
from convnn.selection import soft, straight_through
from convnn.weighting import softmax, softmax_at

T = TypeVar("T")
Schedule: TypeAlias = Callable[[float], T]
Count: TypeAlias = int | Literal["all"]


def stages(values: Mapping[Any, T]) -> Schedule[T]:
    """One value after the other, each from its time on; the first one from the start.

    Example:
        >>> k = stages({0: "all", 2: 25, 4: 9})
        >>> k(0), k(1.99), k(2), k(100)
        ('all', 'all', 25, 9)
    """
    times = sorted(values)
    if not times or times[0] != 0:
        raise ValueError(f"the first stage must begin at 0, got {times}")
    return lambda time: values[times[max(0, bisect_right(times, time) - 1)]]


def line(start: float, end: float, *, over: float, after: float = 0.0) -> Schedule[float]:
    """A straight line from ``start`` to ``end``, which begins ``after`` so many epochs and takes so many more.

    Example:
        >>> share = line(0, 1, over=4)
        >>> share(0), share(1), share(4), share(9)
        (0.0, 0.25, 1.0, 1.0)
    """
    part = _part(over, after)
    return lambda time: float(end) if part(time) == 1 else start + (end - start) * part(time)


def decay(start: float, end: float, *, over: float, after: float = 0.0) -> Schedule[float]:
    """From ``start`` to ``end`` by the same factor in the same time, as suits a temperature.

    Example:
        >>> temperature = decay(1, 0.01, over=2)
        >>> temperature(0), round(temperature(1), 6), temperature(5)
        (1.0, 0.1, 0.01)
    """
    if not (start > 0 and end > 0):
        raise ValueError(f"both ends must be greater than 0, got {start} and {end}")
    part = _part(over, after)
    return lambda time: float(end) if part(time) == 1 else float(start) * (end / start) ** part(time)


def _part(over: float, after: float) -> Schedule[float]:
    if not (over > 0 and isfinite(over)) or not (after >= 0 and isfinite(after)):
        raise ValueError(f"over must be more than 0 epochs and after at least 0, got {over} and {after}")
    return lambda time: min(1.0, max(0.0, (time - after) / over))


def apply(
    model: nn.Module,
    pattern: str = "*",
    *,
    k: Count | None = None,
    share: float | None = None,
    temperature: float | None = None,
    selection: float | None = None,
) -> list[str]:
    """Set what is given in every layer that chooses neighbours and whose name fits; return their names.

    No parameter changes its shape, so that optimisers and checkpoints stay what they are.

    Args:
        pattern: of names as ``model.named_modules()`` has them, with ``*`` and ``?``.
        k: how many neighbours. A kernel has a tap for every rank: fewer neighbours use the first k of them, and more
            than it has taps cannot be. ``"all"`` is for layers without one.
        share: of features in a fixed blend, from 0, nearest in space, to 1, most alike.
        temperature: of the softmax that weighs the neighbours.
        selection: temperature of a selection that was built soft or straight-through; soft at 0 is hard.

    Example:
        >>> model = nn.Sequential(ConvNNAttention(32, 4, k=25), ConvNNAttention(32, 4, k="all", kernel=None))
        >>> apply(model, k=9)
        ['0', '1']
        >>> model[0].kernel.weight.shape, model[0](torch.randn(2, 30, 32)).shape
        (torch.Size([8, 1, 25]), torch.Size([2, 30, 32]))
    """
    given = {"k": k, "share": share, "temperature": temperature, "selection": selection}
    wanted = {name: value for name, value in given.items() if value is not None}
    found = [(name, layer) for name, layer in layers(model) if fnmatchcase(name, pattern)]
    if not found:
        raise ValueError(f"no layer that chooses neighbours has a name like {pattern!r}; {_there(model)}")
    # All are asked before one is changed.
    changes = [(name, layer, [_SET[word](layer, value) for word, value in wanted.items()]) for name, layer in found]
    for _, layer, attributes in changes:
        for place, attribute, value in attributes:
            setattr(place or layer, attribute, value)
    return [name for name, _ in found]


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers of a model that choose neighbours, with their names."""
    kinds = (ConvNNAttention, MultiheadConvNN, ConvNNNd)
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, kinds) or getattr(module, "chooses_neighbours", False)
    ]


def dial(model: nn.Module) -> dict[str, list[float]]:
    """Where every layer with a blend stands between space, 0, and features, 1: one share, or one for each head.

    Example:
        >>> from convnn import ConvNN2d
        >>> dial(nn.Sequential(ConvNN2d(3, 8, 3, blend=0.25), nn.ReLU()))
        {'0': [0.25]}
    """
    return {name: layer.blend.shares for name, layer in layers(model) if getattr(layer, "blend", None) is not None}


Change: TypeAlias = tuple[Any, str, Any]


def _k(layer: Any, k: Count) -> Change:
    kernel: Any = layer.weight.flatten(2) if isinstance(layer, ConvNNNd) else getattr(layer.kernel, "weight", None)
    if isinstance(layer, ConvNNNd) and (not layer.by_features or layer.blend is not None) and k != kernel.shape[-1]:
        raise ValueError(f"the taps of a search in space are places and not ranks: k stays {kernel.shape[-1]}, got {k}")
    if isinstance(k, str):
        if k != "all" or kernel is not None:
            raise ValueError(f"k must be a whole number, or 'all' in a layer without a kernel, got {k!r}")
        return None, "k", k
    checks.whole("k", k, 1)
    if kernel is not None and k > kernel.shape[-1]:
        raise ValueError(f"k must be at most the number of taps of the layer's kernel, {kernel.shape[-1]}, got {k}")
    return None, "k", k


def _share(layer: Any, share: float) -> Change:
    blend: Blend | None = getattr(layer, "blend", None)
    if blend is None:
        raise ValueError(f"a share needs a layer built with a blend, got {type(layer).__name__}")
    if blend.learns:
        raise ValueError("a learned share moves by itself; schedules are for fixed ones")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be from 0, space only, to 1, features only, got {share}")
    return blend, "start", float(share)


def _temperature(layer: Any, temperature: float) -> Change:
    if layer.weighting is not softmax and not isinstance(layer.weighting, softmax_at):
        name = getattr(layer.weighting, "__name__", type(layer.weighting).__name__)
        raise ValueError(f"a temperature is for a layer that weighs by softmax, got {name}")
    return None, "weighting", softmax_at(float(temperature))


def _selection(layer: Any, temperature: float) -> Change:
    chosen = getattr(layer, "selection", None)
    if not isinstance(chosen, (soft, straight_through)):
        name = getattr(chosen, "__name__", type(chosen).__name__)
        raise ValueError(f"a layer must be built with selection=soft(T) or straight_through(T), got {name}")
    return None, "selection", replace(chosen, temperature=float(temperature))


_SET: dict[str, Callable[[Any, Any], Change]] = {
    "k": _k,
    "share": _share,
    "temperature": _temperature,
    "selection": _selection,
}


def _there(model: nn.Module) -> str:
    names = [name for name, _ in layers(model)]
    return f"there are {', '.join(names)}" if names else "there is none in this model"
