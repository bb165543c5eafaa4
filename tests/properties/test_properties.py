"""What must hold for any sizes and any numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from convnn.backends.chunked import with_budget
from convnn.functional import convnn
from tests.definition.test_operator import BACKENDS, SIMILARITIES, WEIGHTINGS

size = st.integers(1, 9)
compared = st.integers(3, 9)  # with fewer, every cosine or correlation is 1 or -1, and equals have no order
seeds = st.integers(0, 2**31)
backends = st.sampled_from(BACKENDS)
similarities = st.sampled_from(SIMILARITIES)
weightings = st.sampled_from(WEIGHTINGS)


def tokens(seed: int, n: int, m: int, e: int, c: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return tuple(torch.randn(2, *shape, dtype=torch.float64) for shape in ((n, e), (m, e), (m, c)))  # type: ignore[return-value]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@given(seeds, size, size, compared, size, similarities, weightings, backends, st.data())
def test_permuting_the_keys_changes_nothing(
    seed: int, n: int, m: int, e: int, c: int, similarity: Any, weighting: Any, backend: Any, data: Any
) -> None:
    query, key, value = tokens(seed, n, m, e, c)
    k = data.draw(st.integers(1, m))
    kernel, mask, shuffle = torch.randn(3, c, k, dtype=torch.float64), torch.rand(n, m) < 0.7, torch.randperm(m)
    options: Any = {"k": k, "similarity": similarity, "weighting": weighting, "backend": backend}
    plain = convnn(query, key, value, kernel, mask=mask, **options)
    shuffled = convnn(query, key[:, shuffle], value[:, shuffle], kernel, mask=mask[:, shuffle], **options)
    close(shuffled, plain)


@given(seeds, size, st.integers(2, 9), compared, size, similarities, weightings, backends, st.data())
def test_a_forbidden_key_might_as_well_be_absent(
    seed: int, n: int, m: int, e: int, c: int, similarity: Any, weighting: Any, backend: Any, data: Any
) -> None:
    query, key, value = tokens(seed, n, m, e, c)
    absent = data.draw(st.integers(0, m - 1))
    k = data.draw(st.one_of(st.integers(1, m - 1), st.just("all")))
    present = torch.arange(m) != absent
    key[:, absent] = torch.nan  # not even this may be seen
    options: Any = {"k": k, "similarity": similarity, "weighting": weighting, "backend": backend}
    masked = convnn(query, key, value, mask=present, **options)
    close(masked, convnn(query, key[:, present], value[:, present], **options))


@given(seeds, size, size, compared, size, similarities, weightings, st.integers(1, 300), st.data())
def test_the_size_of_the_blocks_changes_nothing(
    seed: int, n: int, m: int, e: int, c: int, similarity: Any, weighting: Any, budget: int, data: Any
) -> None:
    query, key, value = tokens(seed, n, m, e, c)
    k = data.draw(st.one_of(st.integers(1, m), st.just("all")))
    kernel = None if k == "all" else torch.randn(c, 1, k, dtype=torch.float64)
    mask = torch.randn(n, m, dtype=torch.float64).masked_fill(torch.rand(n, m) < 0.3, -torch.inf)
    options: Any = {"k": k, "similarity": similarity, "weighting": weighting, "mask": mask}
    whole = convnn(query, key, value, kernel, backend="reference", **options)
    close(convnn(query, key, value, kernel, backend=with_budget(budget), **options), whole)


@given(seeds, size, size, compared, size, backends, st.sampled_from(["plain", "causal", "bool", "float"]))
def test_all_keys_with_softmax_is_attention(
    seed: int, n: int, m: int, e: int, c: int, backend: Any, masking: str
) -> None:
    query, key, value = tokens(seed, n, m, e, c)
    allowed = torch.rand(n, m) < 0.5
    floats = torch.randn(n, m, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    mask: Any = {"plain": None, "causal": "causal", "bool": allowed, "float": floats}[masking]
    ours = convnn(query, key, value, k="all", mask=mask, backend=backend)
    given_mask = None if isinstance(mask, str) else mask
    close(ours, F.scaled_dot_product_attention(query, key, value, given_mask, is_causal=masking == "causal"))
    by_number = convnn(query, key, value, k=m, mask=mask, backend=backend)
    close(by_number, ours)


@given(seeds, size, size, compared, size, backends, st.data())
def test_k_nearest_is_attention_with_all_but_the_top_k_masked_out(
    seed: int, n: int, m: int, e: int, c: int, backend: Any, data: Any
) -> None:
    query, key, value = tokens(seed, n, m, e, c)
    k = data.draw(st.integers(1, m))
    scores = query @ key.mT
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(k).indices, True)
    ours = convnn(query, key, value, k=k, backend=backend)
    close(ours, F.scaled_dot_product_attention(query, key, value, attn_mask=kept))


@given(seeds, size, size, compared, size, backends, st.data())
def test_unit_depthwise_weights_are_no_kernel(
    seed: int, n: int, m: int, e: int, c: int, backend: Any, data: Any
) -> None:
    query, key, value = tokens(seed, n, m, e, c)
    k = data.draw(st.integers(1, m))
    ones = torch.ones(c, 1, k, dtype=torch.float64)
    close(convnn(query, key, value, ones, k=k, backend=backend), convnn(query, key, value, k=k, backend=backend))
