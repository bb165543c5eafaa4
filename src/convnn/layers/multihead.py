"""ConvNN in the place of torch's multi-head attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn import checks, functional
from convnn.backends import Backend
from convnn.candidates import Candidates, Cells
from convnn.layers import shapes
from convnn.layers.configurable import Configurable
from convnn.layers.kernel import Kernel, Kind, with_weights
from convnn.masks import MASKS, Mask, Rule, causal
from convnn.names import resolve
from convnn.search import SelfScore
from convnn.similarity import SIMILARITIES, Similarity
from convnn.weighting import WEIGHTINGS, Weigh, Weighting


class MultiheadConvNN(Configurable, nn.MultiheadAttention):
    """Attention to the k nearest keys, with the constructor, parameters and call of torch's multi-head attention.

    It works inside torch's transformer layers and switches off their fast path, which would compute plain attention
    without asking. Where no key may be chosen the output is the bias of ``out_proj``; torch's is NaN.

    Args:
        k: how many neighbours, or ``"all"``, which is torch's layer.
        kernel: None, or ``"depthwise"``, ``"separable"``, ``"standard"`` for a kernel shared by the heads.
        similarity, weighting, candidates, mask, backend: as in the operator. Beside candidates a token is its own first
            neighbour where ``key`` is the same tensor as ``query``, with a score as ``self_score`` says.

    Example:
        >>> layer = MultiheadConvNN(32, 4, k=9, batch_first=True)
        >>> x = torch.randn(2, 50, 32)
        >>> output, weights = layer(x, x, x)
        >>> output.shape, weights.shape
        (torch.Size([2, 50, 32]), torch.Size([2, 50, 50]))
    """

    def __init__(  # noqa: PLR0917 - the arguments of torch's layer, in its order
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        k: int | Literal["all"] = "all",
        kernel: Kind | None = None,
        similarity: Similarity | str = "scaled_dot",
        weighting: Weighting | str = "softmax",
        candidates: Tensor | Candidates | None = None,
        self_score: SelfScore = "true",
        mask: Mask | str | Sequence[Mask | str] | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        checks.whole("num_heads", num_heads, 1)
        shapes.divides("embed_dim", embed_dim, num_heads, "num_heads")
        if not isinstance(k, str):
            checks.whole("k", k, 1)
        elif k != "all":
            raise ValueError(f"k must be a whole number or 'all', got {k!r}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, **factory
        )
        # Torch's encoder asks for this before it takes its fast path, which knows nothing of neighbours.
        self._qkv_same_embed_dim = False
        if kernel is not None and isinstance(k, str):
            raise ValueError(f"a kernel has a size and k={k!r} has none: give k as a number, or kernel=None")
        checks.one_of("self_score", self_score, ("true", "one"))
        self.k, self.self_score, self.backend = k, self_score, backend
        self.similarity = resolve("similarity", similarity, SIMILARITIES)
        self.weighting = resolve("weighting", weighting, WEIGHTINGS)
        self.mask, self.candidates = shapes.Kept(mask, device), shapes.kept(candidates, device)
        self.kernel = None if kernel is None else Kernel(self.head_dim, k, kernel, **factory)  # type: ignore[arg-type]

    def _reset_parameters(self) -> None:
        weights = [self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        for weight in weights:
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.constant_(self.in_proj_bias, 0.0)
            nn.init.constant_(self.out_proj.bias, 0.0)
        for added in (self.bias_k, self.bias_v):
            if added is not None:
                nn.init.xavier_normal_(added)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.embed_dim}, {self.num_heads}, k={self.k}, batch_first={self.batch_first}"

    def forward(  # noqa: PLR0917 - likewise
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Mask | str | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as torch's layer does: in its masks, True means that a key may *not* be chosen.

        ``is_causal`` without a mask is the causal mask; with one it is a hint, as in torch.
        """
        self._check(query, key, value)
        batched, own = query.ndim == 3, query is key
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (tokens.transpose(0, 1) for tokens in (query, key, value))
        q, x, v = self._projected(query, key, value)  # (B, H, N or M, d)
        masks = self._masks(attn_mask, key_padding_mask, is_causal, (q.shape[0], q.shape[-2], key.shape[-2]))
        options = self._options(x, own) | {"mask": masks or None}
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            output, weights = with_weights(self.kernel, (q, x, v), Weigh(self.weighting, dropout), **options)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            run = functional.convnn if self.kernel is None else self.kernel
            output = run(q, x, v, weighting=self.weighting, dropout_p=dropout, **options)
        output = self.out_proj(output.transpose(1, 2).flatten(-2))  # (B, N, embed_dim)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Each head's queries, keys and values, with the additions to keys and values torch offers."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        parts = [F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True)]
        for number, added in ((1, self.bias_k), (2, self.bias_v)):
            if added is not None:
                parts[number] = torch.cat([parts[number], added.expand(query.shape[0], -1, -1)], 1)
        if self.add_zero_attn:
            parts[1:] = [F.pad(part, (0, 0, 0, 1)) for part in parts[1:]]
        return [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]

    def _options(self, key: Tensor, own: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"k": self.k, "similarity": self.similarity, "backend": self.backend}
        if self.candidates is not None:
            options["candidates"] = self.candidates(key.shape[:-2], Cells((key.shape[-2],)), key.device)
            if own:
                options["self_index"] = torch.arange(key.shape[-2] - self._added, device=key.device)
                options["self_score"] = self.self_score
        return options

    @property
    def _added(self) -> int:
        """How many keys are added behind those that come."""
        return (self.bias_k is not None) + self.add_zero_attn

    def _masks(self, attn_mask: Any, padding: Tensor | None, is_causal: bool, sizes: tuple[int, int, int]) -> list[Any]:
        """Torch's masks as the operator's: True may be chosen, and the added keys are open to all."""
        batch, queries, keys = sizes
        masks = self.mask.all()
        if isinstance(attn_mask, Tensor):
            _require("attn_mask", attn_mask, (queries, keys), (batch * self.num_heads, queries, keys))
            whole = attn_mask.unflatten(0, (batch, self.num_heads)) if attn_mask.ndim == 3 else attn_mask
            masks.append(_turned(whole))
        elif attn_mask is not None:
            masks.append(attn_mask)
        elif is_causal:
            masks.append(causal)
        if padding is not None:
            _require("key_padding_mask", padding, (batch, keys))
            masks.append(_turned(padding[:, None, None, :]))
        return [_opened(mask, keys, self._added) for mask in masks] if self._added else masks

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested:
            raise ValueError(
                "nested tensors are not supported: build the encoder with enable_nested_tensor=False, or set "
                "use_nested_tensor=False on it"
            )
        tokens = (query, key, value)
        if query.ndim not in (2, 3) or key.ndim != query.ndim or value.ndim != query.ndim:
            raise ValueError(f"query, key and value must all have 3 dimensions, or 2 without a batch, {_got(tokens)}")
        sizes = (self.embed_dim, self.kdim, self.vdim)
        if tuple(each.shape[-1] for each in tokens) != sizes:
            raise ValueError(f"query, key and value must have {sizes} channels, {_got(tokens)}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"there must be a value for every key, {_got(tokens)}")
        batch = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[batch] != key.shape[batch]:
            raise ValueError(f"queries and keys must be of one batch, {_got(tokens)}")


def _got(tokens: Sequence[Tensor]) -> str:
    """What came; only said where it is wrong, for a compiler has no words for sizes that change."""
    return "got " + ", ".join(str(tuple(each.shape)) for each in tokens)


def _require(name: str, mask: Tensor, *shapes_allowed: tuple[int, ...]) -> None:
    if tuple(mask.shape) not in shapes_allowed:
        required = " or ".join(map(str, shapes_allowed))
        raise ValueError(f"{name} must have shape {required}, got {tuple(mask.shape)}")


def _turned(mask: Tensor) -> Tensor:
    """Turn a mask of torch's layer round: True may be chosen."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise ValueError(f"a mask must be bool, True where a key may not be chosen, or float, got {mask.dtype}")
    return mask


def _opened(mask: Any, keys: int, added: int) -> Any:
    """A mask of ``keys`` keys, with the added ones behind them open to all."""
    if isinstance(mask, Tensor):
        whole = mask.expand(*mask.shape[:-1], keys)
        return F.pad(whole, (0, added), value=mask.dtype == torch.bool)
    rule = resolve("mask", mask, MASKS)

    def entry(i: Tensor, j: Tensor) -> Tensor:
        said = rule(i, j.clamp(max=keys - 1))
        return torch.where(j >= keys, torch.ones_like(said) if said.dtype == torch.bool else 0.0, said)

    if isinstance(rule, Rule) and rule.sizes is not None:
        return Rule(entry, (rule.sizes[0], rule.sizes[1] + added))
    return entry
