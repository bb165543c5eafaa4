"""ConvNN attention: learned projections, the k nearest keys of every query, a learned kernel over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import checks, functional
from convnn.backends import Backend
from convnn.blend import Blend, instead
from convnn.candidates import Candidates, Cells
from convnn.descriptor import DESCRIPTORS, Descriptor
from convnn.layers import places, shapes
from convnn.layers.cache import Cache, following
from convnn.layers.configurable import Configurable
from convnn.layers.kernel import Kernel, Kind
from convnn.masks import Mask, causal
from convnn.names import resolve
from convnn.relative import RelativeBias
from convnn.search import SelfScore
from convnn.selection import Selection
from convnn.selection import named as selection_of
from convnn.similarity import SIMILARITIES, Similarity
from convnn.weighting import WEIGHTINGS, Weighting


class ConvNNAttention(Configurable):
    """Attention to the k nearest keys, with a learned weight for every rank.

    Its depthwise kernel starts at 1, so that it starts as attention to the k nearest (KVT attention); without a kernel
    and with ``k="all"`` it is self-attention. Parameters are named as in timm's ``Attention``.

    Args:
        dim: the channels of the tokens.
        k: how many neighbours; ``"all"`` where there is no kernel.
        kernel: ``"depthwise"``, ``"separable"``, ``"standard"`` or None.
        shared_kernel: whether the heads share one kernel; otherwise each has its own.
        kernel_init: where separable and standard kernels start: ``"default"`` as torch's convolutions do,
            ``"preserving"`` where they change nothing.
        qk_dim, v_dim, out_dim: the channels of queries and keys, of values (all heads together), and of the output;
            None for ``dim``.
        attn_head_dim: the channels of one head, which sets ``qk_dim`` and ``v_dim``.
        qkv_bias, proj_bias, qk_norm, scale_norm, norm_layer: as in timm.
        attn_drop, kernel_drop, proj_drop: dropout of the weights, after the kernel, and after the projection.
        similarity, weighting, selection, candidates, mask, backend: as in the operator. Beside candidates a token is
            its own first neighbour, with a score as ``self_score`` says.
        subset: project all keys, then take the candidates (``"after"``), or the other way round (``"before"``).
        position: a descriptor applied to the queries and keys of each head, or a ``RelativeBias``.
        blend: a :class:`~convnn.blend.Blend` of places and what the heads compare, instead of similarity and position.

    Shape:
        ``(..., N, dim)`` to ``(..., N, out_dim)``.

    Example:
        >>> layer = ConvNNAttention(32, 4, k=9)
        >>> layer(torch.randn(2, 50, 32)).shape
        torch.Size([2, 50, 32])
        >>> layer.kernel.weight.shape
        torch.Size([8, 1, 9])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        k: int | Literal["all"],
        kernel: Kind | None = "depthwise",
        shared_kernel: bool = True,
        kernel_init: Literal["default", "preserving"] = "default",
        qk_dim: int | None = None,
        v_dim: int | None = None,
        out_dim: int | None = None,
        attn_head_dim: int | None = None,
        qkv_bias: bool = False,
        proj_bias: bool = True,
        qk_norm: bool = False,
        scale_norm: bool = False,
        norm_layer: Any = nn.LayerNorm,
        attn_drop: float = 0.0,
        kernel_drop: float = 0.0,
        proj_drop: float = 0.0,
        similarity: Similarity | str = "scaled_dot",
        weighting: Weighting | str = "softmax",
        candidates: Tensor | Candidates | None = None,
        self_score: SelfScore = "true",
        subset: Literal["before", "after"] = "after",
        position: Descriptor | RelativeBias | str | None = None,
        blend: Blend | None = None,
        selection: Selection | str = "hard",
        mask: Mask | str | Sequence[Mask | str] | None = None,
        backend: str | Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = shapes.factory(device, dtype)
        checks.whole("num_heads", num_heads, 1)
        inner = dim if attn_head_dim is None else num_heads * attn_head_dim
        sizes = [inner if given is None else given for given in (qk_dim, v_dim)]
        sizes.append(dim if out_dim is None else out_dim)
        for name, size in zip(("qk_dim", "v_dim", "out_dim"), sizes, strict=True):
            checks.whole(name, size, 1)
        self.dim, self.num_heads, (self.qk_dim, self.v_dim, outputs) = dim, num_heads, sizes
        shapes.divides("the channels of queries and keys", self.qk_dim, num_heads, "the heads")
        shapes.divides("the channels of values", self.v_dim, num_heads, "the heads")
        if not isinstance(k, str):
            checks.whole("k", k, 1)
        elif kernel is not None:
            raise ValueError(f"a kernel has a size and k={k!r} has none: give k as a number, or kernel=None")
        shapes.check_subset(subset, self_score, candidates is None)
        self.k, self.subset, self.self_score, self.backend = k, subset, self_score, backend
        similarity, position = (similarity, position) if blend is None else instead(blend, similarity, position)
        self.similarity = resolve("similarity", similarity, SIMILARITIES)
        self.weighting, self.selection = resolve("weighting", weighting, WEIGHTINGS), selection_of(selection)
        self.position = None if position is None else resolve("position", position, DESCRIPTORS)
        self.mask, self.candidates = shapes.Kept(mask, device), shapes.kept(candidates, device)

        self.qkv = nn.Linear(dim, 2 * self.qk_dim + self.v_dim, bias=qkv_bias, **factory)
        per_head = self.qk_dim // num_heads
        self.q_norm, self.k_norm = (norm_layer(per_head, **factory) if qk_norm else nn.Identity() for _ in range(2))
        started: dict[str, Any] = {"heads": None if shared_kernel else num_heads, "init": kernel_init, **factory}
        self.kernel = None if kernel is None else Kernel(self.v_dim // num_heads, k, kernel, **started)  # type: ignore[arg-type]
        self.norm = norm_layer(self.v_dim, **factory) if scale_norm else nn.Identity()
        self.attn_drop, self.kernel_drop, self.proj_drop = attn_drop, nn.Dropout(kernel_drop), nn.Dropout(proj_drop)
        self.proj = nn.Linear(self.v_dim, outputs, bias=proj_bias, **factory)

    def extra_repr(self) -> str:  # noqa: D102
        return f"num_heads={self.num_heads}, k={self.k}"

    @property
    def blend(self) -> Blend | None:
        """The share of space and features, where it is one."""
        return self.similarity if isinstance(self.similarity, Blend) else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        attn_mask: Mask | str | Sequence[Mask | str] | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        coords: Tensor | None = None,
        context_coords: Tensor | None = None,
    ) -> Tensor:
        """Attend to the tokens themselves, or to a context.

        Args:
            context: ``(..., M, dim)``, the tokens to choose from; None for x.
            attn_mask: as in ``F.scaled_dot_product_attention`` (True may be chosen, floats are added), broadcasting to
                ``(..., heads, N, M)``; or a rule, or several masks.
            key_padding_mask: ``(..., M)``, True for what is padding, as in :class:`torch.nn.MultiheadAttention`.
            is_causal: whether a token may choose itself and those before it only.
            coords: where the tokens are, for ``position``: ``(N, D)``, or ``(..., N, D)`` if samples differ; None for
                places in a sequence.
            context_coords: where the tokens of the context are, beside ``coords``.
        """
        self._check(x, context)
        places.require(self.position, coords, context_coords, context is not None)
        candidates = self._candidates(x if context is None else context)
        query, key, value = self._projected(x, context, candidates)
        masks = [*self.mask.all(), *shapes.asked(attn_mask, key_padding_mask, is_causal)]
        if isinstance(self.position, RelativeBias):
            masks.append(places.biased(self.position, x.shape[-2], context is not None))
        elif self.position is not None:
            query = places.described(self.position, query, coords)
            key = places.described(self.position, key, coords if context is None else context_coords)
        options: dict[str, Any] = {"candidates": candidates}
        if self.candidates is not None and context is None:
            options |= {"self_index": torch.arange(x.shape[-2], device=x.device), "self_score": self.self_score}
        return self._combined(query, key, value, masks, **options)

    @torch.no_grad()
    def step(self, x: Tensor, cache: Cache, *, coords: Tensor | None = None) -> tuple[Tensor, Cache]:
        """Attend from the next tokens to themselves and those before: ``forward(..., is_causal=True)``, part by part.

        There may be fewer tokens so far than k. No gradients flow.

        Args:
            x: the next tokens, ``(..., n, dim)``.
            cache: those before; ``Cache(room)`` to begin with.
            coords: where the next tokens are, if they are not the next of a sequence.

        Returns:
            The output of the next tokens, ``(..., n, out_dim)``, and the cache with them.
        """
        self._check(x, None)
        places.require(self.position, coords, None, False)
        if self.candidates is not None:
            raise ValueError("candidates are chosen among all tokens, and of a sequence that grows not all are there")
        query, key, value = self._projected(x, None, None)
        start, stop = cache.length, cache.length + x.shape[-2]
        masks = [mask for mask in self.mask.all() if mask is not causal]
        if isinstance(self.position, RelativeBias):
            masks.append(self.position)
        elif self.position is not None:
            coords = places.counted(self.position, start, stop, x.device) if coords is None else coords
            query, key = (places.described(self.position, tokens, coords) for tokens in (query, key))
        least = 1 if isinstance(self.k, str) else self.k
        cache, keys = cache.extended(key, value, least), max(stop, least)
        if x.shape[-2] > 1 or keys > stop:  # otherwise the one token is the last, and sees all there are
            masks.append(causal)
        laid = [following(mask, start, stop, keys) for mask in masks]
        key, value = (buffer[..., :keys, :] for buffer in (cache.key, cache.value) if buffer is not None)
        return self._combined(query, key, value, laid), cache

    def _combined(self, query: Tensor, key: Tensor, value: Tensor, masks: list[Any], **options: Any) -> Tensor:
        """Run the operator in every head, ``(..., H, N, d)``, and join the heads."""
        options |= {"k": self.k, "similarity": self.similarity, "weighting": self.weighting, "mask": masks or None}
        options |= {"dropout_p": self.attn_drop if self.training else 0.0, "backend": self.backend}
        options |= {"selection": self.selection}
        run = functional.convnn if self.kernel is None else self.kernel
        combined = run(query, key, value, **options).transpose(-2, -3).flatten(-2)  # (..., N, v_dim)
        return self.proj_drop(self.proj(self.kernel_drop(self.norm(combined))))

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        for name, tokens in (("x", x), ("context", context)):
            if tokens is not None and (tokens.ndim < 2 or tokens.shape[-1] != self.dim):
                required = f"(..., tokens, {self.dim})"
                raise ValueError(f"{name} must have shape {required}, got {tuple(tokens.shape)}")

    def _candidates(self, tokens: Tensor) -> Tensor | None:
        if self.candidates is None:
            return None
        lead = torch.Size((*tokens.shape[:-2], self.num_heads))
        return self.candidates(lead, Cells((tokens.shape[-2],)), tokens.device)

    def _projected(self, x: Tensor, context: Tensor | None, candidates: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values of each head, ``(..., H, N, d)``."""
        sizes = [self.qk_dim, self.qk_dim, self.v_dim]
        if context is None and self.subset == "after":
            parts = self.qkv(x).split(sizes, -1)
        elif not shapes.is_plain(self.qkv):
            # Somebody's own module, or one with hooks: it is called as it is.
            parts = (self.qkv(x)[..., : self.qk_dim], *self.qkv(x if context is None else context).split(sizes, -1)[1:])
        else:
            weights, tokens = self.qkv.weight.split(sizes), x if context is None else context
            biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.split(sizes)
            query, value = F.linear(x, weights[0], biases[0]), F.linear(tokens, weights[2], biases[2])
            parts = (query, self._keys(tokens, weights[1], biases[1], candidates), value)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3) for part in parts)
        return self.q_norm(query), self.k_norm(key), value

    def _keys(self, tokens: Tensor, weight: Tensor, bias: Tensor | None, candidates: Tensor | None) -> Tensor:
        if self.subset == "after" or candidates is None:
            return F.linear(tokens, weight, bias)
        if candidates.ndim != 1:
            came = f"an index of shape {tuple(candidates.shape)}"
            raise ValueError(f"subset='before' needs candidates that are the same for the whole batch, got {came}")
        # What is no candidate is never looked at.
        keys = F.linear(tokens.index_select(-2, candidates), weight, bias)
        return keys.new_zeros(*tokens.shape[:-1], keys.shape[-1]).index_copy(tokens.ndim - 2, candidates, keys)
