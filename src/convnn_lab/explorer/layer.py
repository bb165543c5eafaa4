"""What a layer compares, where on the picture its cells lie, and how it chooses: all that is needed to look at it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from convnn.backends import Backend
from convnn.backends.reference import BACKEND as REFERENCE
from convnn.blend import Blend
from convnn.candidates import Cells, grid, random
from convnn.functional import nearest
from convnn.layers.windows import Nearness
from convnn.masks import Rule, bigbird, causal, window
from convnn.neighbors import Neighbors
from convnn.similarity import SIMILARITIES, Similarity
from convnn.weighting import WEIGHTINGS, Weigh, Weighting, softmax_at
from convnn_lab.explorer.places import Map


@dataclass(frozen=True)
class Choices:
    """How neighbours are chosen and weighed, in plain values; the controls of the page are these.

    Args:
        share: from 0, nearest in space, to 1, most alike: score by score, as :class:`~convnn.blend.Blend` has it.
        space: the similarity of places; ``"window"`` is that of the layer's own window.
        count, seed: of random candidates, or of a grid of them.
        radius, globals, random, mask_seed: of a window and of BigBird.
        self: whether a query's own key is a key like ``"any"``, its ``"first"`` neighbour, or that with a score of
            ``"one"``.
    """

    k: int | Literal["all"] = 9
    share: float = 1.0
    space: str = "chebyshev"
    similarity: str = "cosine"
    weighting: str = "uniform"
    temperature: float = 1.0
    candidates: Literal["all", "random", "grid", "own"] = "all"
    count: int = 64
    seed: int = 0
    mask: Literal["none", "causal", "window", "bigbird", "own"] = "none"
    radius: int = 8
    globals: int = 1
    random: int = 3
    mask_seed: int = 0
    self: Literal["any", "first", "one"] = "any"

    def as_page(self) -> dict[str, Any]:
        """As the page's script names them."""
        said = asdict(self)
        return {**said, "maskSeed": said.pop("mask_seed")}


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer looked at with one picture.

    Args:
        query: what is compared of the queries; None where a query is the key in its place.
        own: how the layer chooses, as far as that can be said.
        candidates: those the layer took, where no rule of ``own`` gives them, one row for each head or one for all.
        mask: those it lets a query choose, likewise.
        notes: what cannot be said.

    Shape:
        key ``(H, M, E)``, query ``(H, N, E)``, candidates ``(H or 1, r)``, mask ``(N, M)``.
    """

    name: str
    kind: str
    map: Map
    key: Tensor
    query: Tensor | None = None
    own: Choices = field(default_factory=Choices)
    candidates: Tensor | None = None
    mask: Tensor | None = None
    notes: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return self.key.shape[0]

    def compared(self) -> tuple[Tensor, Tensor]:
        """Queries ``(H, N, E)`` and keys ``(H, M, E)``."""
        return (self.key[:, self.map.own_keys()] if self.query is None else self.query), self.key

    def rounded(self) -> Layer:
        """With the numbers of half precision that the page has, in double precision."""
        scale = 2.0 ** exponent(self)

        def half(part: Tensor) -> Tensor:
            return (part.double() / scale).half().double() * scale

        return replace(self, key=half(self.key), query=None if self.query is None else half(self.query))


def exponent(layer: Layer) -> int:
    """The power of two by which features are divided so that half precision holds them: 0 where it does anyway."""
    given = [part for part in (layer.key, layer.query) if part is not None]
    largest = max(float(part.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for part in given)
    if largest == 0 or 2**-4 <= largest <= 2**15:
        return 0
    return int(torch.tensor(largest, dtype=torch.float64).log2().floor()) - 4


def found(
    layer: Layer, choices: Choices, backend: str | Backend = REFERENCE, *, only: int | None = None
) -> tuple[Neighbors, Tensor]:
    """The neighbours of every query of every head and their weights, by the library's own search, ``(H, N, K)``.

    Args:
        only: search for this query alone; N is then 1.
    """
    (query, key), before = layer.compared(), layer.map.before
    masks: list[Any] = [rule for rule in (_mask(layer, choices),) if rule is not None]
    if choices.share < 1:
        query, key = _placed(query, layer.map.centres(), before), _placed(key, layer.map.places(), before)
        if before:
            masks.append(Rule(partial(_have_places, before=before)))
    own = layer.map.own_keys() if choices.self != "any" else None
    if only is not None:
        query, own = query[:, only : only + 1], None if own is None else own[only : only + 1]
        masks = [mask[only : only + 1] if isinstance(mask, Tensor) else _row(mask, only) for mask in masks]
    among = _candidates(layer, choices)
    limit = key.shape[-2] if among is None else among.shape[-1]
    near = nearest(
        query,
        key,
        k=choices.k if isinstance(choices.k, str) else min(choices.k, limit),
        similarity=_similarity(layer, choices),
        mask=masks or None,
        candidates=among,
        self_index=own,
        self_score="one" if choices.self == "one" else "true",
        backend=backend,
    )
    return near, Weigh(weighting(choices))(near.scores, near.filled)


def _row(rule: Any, number: int) -> Rule:
    """A rule for one row alone."""
    return Rule(lambda i, j: rule(i + number, j))


def weighting(choices: Choices) -> Weighting:
    """The weighting of some choices."""
    return softmax_at(choices.temperature) if choices.weighting == "softmax_at" else WEIGHTINGS[choices.weighting]


def _similarity(layer: Layer, choices: Choices) -> Similarity:
    if choices.share == 1:
        return SIMILARITIES[choices.similarity]
    space: Any = choices.space
    if space == "window":
        if layer.map.kernel is None:
            raise ValueError(f"{layer.name} has no window of its own: space must be a similarity of places")
        space = Nearness(layer.map.kernel, layer.map.dilation)
    return Blend(choices.share, space=space, features=choices.similarity)


def _placed(tokens: Tensor, places: Tensor, before: int) -> Tensor:
    """Places beside features, with 0 for tokens that have none."""
    known = torch.cat([places.new_zeros(before, 2), places]).to(tokens.dtype)
    return torch.cat([known.expand(tokens.shape[0], -1, -1), tokens], -1)


def _have_places(i: Tensor, j: Tensor, *, before: int) -> Tensor:
    return (i >= before) & (j >= before)


def _mask(layer: Layer, choices: Choices) -> Any:
    keys = layer.map.keys
    return {
        "none": lambda: None,
        "causal": lambda: causal,
        "window": lambda: window(choices.radius),
        "bigbird": lambda: bigbird(choices.radius, choices.globals, choices.random, keys=keys, seed=choices.mask_seed),
        "own": lambda: layer.mask,
    }[choices.mask]()


def _candidates(layer: Layer, choices: Choices) -> Tensor | None:
    lead, cells, device = torch.Size(()), _cells(layer), torch.device("cpu")
    if choices.candidates == "random":
        return random(choices.count, seed=choices.seed).eval()(lead, cells, device)
    if choices.candidates == "grid":
        return grid(choices.count)(lead, cells, device)
    return layer.candidates if choices.candidates == "own" else None


def _cells(layer: Layer) -> Cells:
    """The keys as candidates see them: a map, or a sequence where class tokens stand before it."""
    return Cells((layer.map.keys,) if layer.map.before else layer.map.cells)
