"""What the layers on maps compute: the windows of a convolution, the neighbours of your choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import checks, functional, watching
from convnn.backends import Backend
from convnn.blend import Blend
from convnn.candidates import Candidates, Cells
from convnn.descriptor import COORDINATES, DESCRIPTORS, Descriptor
from convnn.layers import shapes
from convnn.layers.configurable import Configurable
from convnn.layers.kernel import first_taps
from convnn.layers.windows import Nearness, Windows
from convnn.masks import Mask
from convnn.names import resolve
from convnn.neighbors import Neighbors
from convnn.patches import shuffle, unshuffle
from convnn.relative import RelativeBias
from convnn.selection import SELECTIONS, Selection, is_hard
from convnn.similarity import SIMILARITIES, Similarity
from convnn.weighting import WEIGHTINGS, Weigh, Weighting, uniform

PADDINGS = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class ConvNNNd(Configurable):
    """What ConvNN1d, ConvNN2d and ConvNN3d have in common; see :mod:`convnn.layers.convnn`."""

    axes: ClassVar[int]
    convolution: ClassVar[Any]
    pointwise: ClassVar[Any]

    def __init__(  # noqa: PLR0917 - the arguments of a convolution, in its order
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        similarity: Similarity | str = "space",
        k: int | None = None,
        weighting: Weighting | str = "uniform",
        selection: Selection | str = "hard",
        candidates: Tensor | Candidates | None = None,
        position: Descriptor | str | None = None,
        blend: float | Blend | None = None,
        patch: int = 1,
        mask: Mask | str | Sequence[Mask | str] | None = None,
        include_padding: bool = True,
        projection: Literal["identity", "linear"] = "identity",
        qk_dim: int | None = None,
        v_dim: int | None = None,
        heads: int = 1,
        boundary: Literal["pad", "shift"] = "pad",
        backend: str | Backend = "auto",
    ) -> None:
        super().__init__()
        counts = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        for name, number in {**counts, "heads": heads, "patch": patch}.items():
            checks.whole(name, number, 1)
        checks.one_of("padding_mode", padding_mode, tuple(PADDINGS))
        checks.one_of("boundary", boundary, ("pad", "shift"))
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = shapes.each("kernel_size", kernel_size, self.axes)
        self.stride = shapes.each("stride", stride, self.axes)
        self.dilation = shapes.each("dilation", dilation, self.axes)
        self.padding = padding if isinstance(padding, str) else shapes.each("padding", padding, self.axes, least=0)
        self.padding_mode, self.boundary = padding_mode, boundary
        self.ends = shapes.ends(padding, self.kernel_size, self.stride, self.dilation)
        if boundary == "shift" and any(sum(end) for end in self.ends):
            raise ValueError(f"boundary='shift' moves windows inwards instead of padding, got padding={padding!r}")
        self.k = prod(self.kernel_size) if k is None else k
        checks.whole("k", self.k, 1)
        self.patch, self.heads, self.include_padding, self.backend = patch, heads, include_padding, backend
        self.weighting = resolve("weighting", weighting, WEIGHTINGS)
        self.selection = resolve("selection", selection, SELECTIONS)
        if heads > 1 and not is_hard(self.selection):
            raise ValueError(f"a selection that is not hard needs heads=1, got {heads}")
        self.mask, self.candidates = shapes.Kept(mask, device), shapes.kept(candidates, device)
        self._compare_by(similarity, blend, position)
        self._build(projection, qk_dim, v_dim, bias, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def _compare_by(self, similarity: Similarity | str, blend: float | Blend | None, position: Any) -> None:
        """Keep what decides how near a cell is."""
        self.space = Nearness(self.kernel_size, self.dilation)
        self.by_features = similarity != "space" or blend is not None
        if isinstance(position, RelativeBias):
            raise ValueError("a relative bias is added to scores: give it as mask, not as position")
        if position is not None and not self.by_features:
            raise ValueError("a position beside features needs a similarity of features; 'space' compares places alone")
        self.position = None if position is None else resolve("position", position, DESCRIPTORS)
        chosen = resolve("similarity", similarity, {"space": self.space, **SIMILARITIES})
        if blend is not None and not isinstance(blend, Blend):
            features = "cosine" if similarity == "space" else chosen
            blend = Blend(blend, axes=self.axes, space=self.space, features=features)
        if blend is not None and blend.needs_scores and not self.learns_by_scores:
            needs = "a weighting that depends on scores, such as softmax, or a selection with a gradient"
            raise ValueError(f"{blend.needs_scores} needs {needs}, such as straight_through")
        self.similarity = chosen if blend is None else blend

    def _build(
        self, projection: str, qk_dim: int | None, v_dim: int | None, bias: bool, factory: dict[str, Any]
    ) -> None:
        """Make the parameters."""
        checks.one_of("projection", projection, ("identity", "linear"))
        channels, outputs = (count * self.patch**self.axes for count in (self.in_channels, self.out_channels))
        if projection == "identity" and (qk_dim is not None or v_dim is not None):
            raise ValueError("qk_dim and v_dim are the sizes of projections and need projection='linear'")
        values, compared = (channels if given is None else given for given in (v_dim, qk_dim))
        checks.whole("v_dim", values, 1)
        checks.whole("qk_dim", compared, 1)
        if projection == "linear" and self.by_features:
            self.to_query = nn.Linear(channels, compared, bias=False, **factory)
            self.to_key = nn.Linear(channels, compared, bias=False, **factory)
            # Where all neighbours count alike nothing flows to how they are compared, and nothing should wait for it.
            for projection_of in (self.to_query, self.to_key):
                projection_of.weight.requires_grad_(self.learns_by_scores)
        self.to_value = nn.Linear(channels, values, bias=False, **factory) if projection == "linear" else nn.Identity()
        self.projected = projection == "linear"
        if self.by_features:
            shapes.divides("the compared channels", compared, self.heads, "the heads")
        for name, count in (("the channels of the values", values), ("the output channels", outputs)):
            shapes.divides(name, count, self.groups * self.heads, "groups times heads")
        taps = self.kernel_size if self.k == prod(self.kernel_size) else (self.k,)
        self.weight = nn.Parameter(torch.empty(outputs, values // (self.groups * self.heads), *taps, **factory))
        self.bias = nn.Parameter(torch.empty(outputs, **factory)) if bias else None
        self.mix = self.pointwise(outputs, outputs, 1, **factory) if self.heads > 1 else None

    def reset_parameters(self) -> None:
        """Start the kernel as torch's convolutions do."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight[0].numel())
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:  # noqa: D102
        said = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, k={self.k}"
        for name, plain in (("stride", 1), ("padding", 0), ("dilation", 1)):
            given = getattr(self, name)
            said += "" if given in (plain, (plain,) * self.axes) else f", {name}={given}"
        for name, value in (("groups", 1), ("padding_mode", "zeros"), ("heads", 1), ("patch", 1), ("boundary", "pad")):
            said += "" if getattr(self, name) == value else f", {name}={getattr(self, name)!r}"
        near = getattr(self.similarity, "__name__", type(self.similarity).__name__) if self.by_features else "space"
        return f"{said}, similarity={near}" + ("" if self.bias is not None else ", bias=False")

    @property
    def blend(self) -> Blend | None:
        """The share of space and features, where it is one."""
        return self.similarity if isinstance(self.similarity, Blend) else None

    @property
    def learns_by_scores(self) -> bool:
        """Whether anything flows to how cells are compared: through their weights, or through who is chosen."""
        return not getattr(self.weighting, "ignores_scores", False) or not is_hard(self.selection)

    @property
    def is_convolution(self) -> bool:
        """Whether the neighbours are a convolution's, so that torch's own may stand for the search."""
        plain = self.backend == "auto" and not self.by_features and self.k == prod(self.kernel_size)
        unmasked = not self.mask.count and self.candidates is None and self.include_padding
        return plain and unmasked and self.weighting is uniform and is_hard(self.selection)

    def forward(self, cells: Tensor) -> Tensor:
        """Map ``(B, C, *size)`` or ``(C, *size)`` to the outputs."""
        if cells.ndim not in (self.axes + 1, self.axes + 2) or cells.shape[-self.axes - 1] != self.in_channels:
            required = f"(B, {self.in_channels}, *size) or ({self.in_channels}, *size) with {self.axes} sides"
            raise ValueError(f"{type(self).__name__} needs a map of shape {required}, got {tuple(cells.shape)}")
        batched = cells if cells.ndim == self.axes + 2 else cells[None]
        patched = unshuffle(batched, self.patch, axes=self.axes) if self.patch > 1 else batched
        size = tuple(patched.shape[2:])
        shifted = self.boundary == "shift"
        windows = Windows(size, self.kernel_size, self.stride, self.dilation, self.ends, shifted)
        output = self._convolved(patched, windows) if self.is_convolution else self._searched(patched, windows)
        if self.mix is not None:
            output = self.mix(output)
        output = shuffle(output, self.patch, axes=self.axes) if self.patch > 1 else output
        output = shapes.laid_out_like(batched, output)
        return output if cells.ndim == self.axes + 2 else output[0]

    def _convolved(self, cells: Tensor, windows: Windows) -> Tensor:
        """The convolution in closed form."""
        if self.projected:
            cells = self.to_value(cells.movedim(1, -1)).movedim(-1, 1)
        stride: Any = 1 if windows.shifted else self.stride
        symmetric = self.padding_mode == "zeros" and all(before == after for before, after in self.ends)
        around: Any = [before for before, _ in self.ends] if symmetric else 0
        cells = cells if symmetric else self._padded(cells)
        groups = self.groups * self.heads
        output = self.convolution(cells, self.weight, self.bias, stride, around, self.dilation, groups)
        for axis, starts in enumerate(windows.starts(cells.device)) if windows.shifted else ():
            output = output.index_select(2 + axis, starts)
        if watching.anyone():
            queries = windows.queries(cells.device)
            pairs, options = self._compared(cells, windows, queries), self._options(cells, windows, queries)
            shape = (prod(windows.outputs), self.k)
            watching.show(prod(windows.padded), shape, lambda: functional.nearest(*pairs, **options), Weigh(uniform))
        return output

    def _padded(self, cells: Tensor) -> Tensor:
        amounts = [amount for end in reversed(self.ends) for amount in end]
        return F.pad(cells, amounts, mode=PADDINGS[self.padding_mode]) if any(amounts) else cells

    def _tokens(self, cells: Tensor) -> Tensor:
        """The cells of the padded map, ``(B, M, C)``, the channels of each side by side."""
        if self.padding_mode == "zeros":
            # Padded last, the map is turned while it is copied anyway.
            amounts = [amount for end in reversed(self.ends) for amount in end]
            cells = cells.movedim(1, -1)
            cells = F.pad(cells, (0, 0, *amounts)) if any(amounts) else cells
        else:
            cells = self._padded(cells).movedim(1, -1)
        return cells.flatten(1, -2).contiguous()

    def _searched(self, cells: Tensor, windows: Windows) -> Tensor:
        """The genuine search."""
        tokens = self._tokens(cells)
        value, kernel = self.to_value(tokens), first_taps(self.weight.flatten(2), self.k)
        queries = windows.queries(tokens.device)
        query, key = self._compared(tokens, windows, queries)
        options = self._options(tokens, windows, queries)
        if query.ndim < 4:
            options |= {"weighting": self.weighting, "selection": self.selection}
            output = functional.convnn(query, key, value, kernel, self.bias, **options)
        else:
            output = self._by_head(value, functional.nearest(query, key, **options), kernel)
        return output.mT.unflatten(2, windows.outputs)

    def _by_head(self, value: Tensor, found: Neighbors, kernel: Tensor) -> Tensor:
        """Combine each head's own channels, at its own neighbours, with its own part of the kernel."""
        parts = shapes.by_head(
            value.chunk(self.heads, -1),
            found,
            kernel.chunk(self.heads),
            weigh=Weigh(self.weighting),
            backend=self.backend,
        )
        output = torch.cat(parts, -1)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _compared(self, tokens: Tensor, windows: Windows, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys: places ``(N, D)``, or features ``(B, N, E)`` or ``(B, heads, N, E)``, or both."""
        device = tokens.device
        if not self.by_features:
            return windows.centres(device), windows.cells(device)
        query, key = (self.to_query(tokens), self.to_key(tokens)) if self.projected else (tokens, tokens)
        if self.heads > 1:
            query, key = (each.unflatten(-1, (self.heads, -1)).movedim(-2, 1) for each in (query, key))
        if self.position is not None:
            coords = getattr(self.position, "coordinates", COORDINATES["-1..1"])(windows.padded, device=device)
            query, key = self.position(query, coords), self.position(key, coords)
        query = query.index_select(-2, queries)
        if self.blend is None:
            return query, key
        return self.blend.descriptor(query, windows.centres(device)), self.blend.descriptor(key, windows.cells(device))

    def _options(self, tokens: Tensor, windows: Windows, queries: Tensor) -> dict[str, Any]:
        """Everything else that decides the neighbours."""
        device, in_space = tokens.device, not self.by_features or self.blend is not None
        mask = [m.on(windows.padded, queries) if isinstance(m, RelativeBias) else m for m in self.mask.all()]
        if in_space and any(d > 1 for d in self.dilation):
            mask.append(windows.dilated())
        if not self.include_padding and any(sum(end) for end in self.ends):
            mask.append(windows.not_padding())
        candidates = None
        if self.candidates is not None:
            lead = (tokens.shape[0], self.heads)[: 1 if self.heads == 1 else 2]
            among = Cells(windows.padded, () if self.include_padding else self.ends)
            candidates = self.candidates(torch.Size(lead), among, device)
        return {
            "k": self.k,
            "similarity": self.similarity,
            "mask": mask or None,
            "candidates": candidates,
            "self_index": None if in_space else queries,
            "order": "key" if in_space else "score",
            "backend": self.backend,
        }
