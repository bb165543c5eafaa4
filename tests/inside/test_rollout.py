"""The rollout against a dense product in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import convnn
from convnn import ConvNN2d, ConvNNAttention
from convnn.inside import Call


def dense(calls: list[Call]) -> Tensor:
    """The definition, token by token, with all N x N shares in float64."""
    whole: Any = None
    for call in calls:
        batch, heads, size, slots = call.index.shape
        matrix = torch.zeros(batch, size, size, dtype=torch.float64)
        for b in range(batch):
            for i in range(size):
                for h in range(heads):
                    for slot in range(slots):
                        j = int(call.index[b, h, i, slot])
                        if j >= 0:
                            matrix[b, i, j] += float(call.weights[b, h, i, slot]) / heads
                total = matrix[b, i].sum()
                matrix[b, i] /= total if total > 0 else 1
                matrix[b, i] += torch.eye(size, dtype=torch.float64)[i]
                matrix[b, i] /= matrix[b, i].sum()
        whole = matrix if whole is None else matrix @ whole
    return whole


def recorded(*, tokens: int = 11, **options: Any) -> convnn.inside.Record:
    layers = [ConvNNAttention(12, 3, k=k, **options) for k in (4, 3, 5)]
    with convnn.record(model := nn.Sequential(*layers)) as seen:
        model(torch.randn(2, tokens, 12))
        model(torch.randn(2, tokens + 2, 12))
    return seen


@pytest.mark.parametrize("options", [{}, {"weighting": "uniform"}, {"mask": "causal"}], ids=str)
def test_it_is_the_product_of_all_layers(options: dict[str, Any]) -> None:
    seen = recorded(**options)
    for forward, size in ((0, 11), (-1, 13)):
        calls = [call for call in seen.calls if call.forward == forward % 2]
        expected = dense(calls)
        ours = convnn.sparse_rollout(seen, forward=forward)
        assert ours.layout == torch.sparse_coo
        assert ours.shape == (2, size, size)
        torch.testing.assert_close(ours.to_dense().double(), expected, rtol=1e-5, atol=1e-6)
        some = convnn.sparse_rollout(calls, tokens=[0, 5, size - 1])
        torch.testing.assert_close(some.double(), expected[:, [0, 5, size - 1]], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(some.sum(-1), torch.ones(2, 3))


def test_a_token_that_chose_nobody_keeps_to_itself() -> None:
    allowed = torch.ones(6, 6, dtype=torch.bool)
    allowed[2] = False
    layers = nn.Sequential(*(ConvNNAttention(12, 3, k=2, mask=allowed) for _ in range(2)))
    with convnn.record(layers) as seen:
        layers(torch.randn(1, 6, 12))
    ours = convnn.sparse_rollout(seen).to_dense()
    assert torch.equal(ours[0, 2], torch.eye(6)[2])
    torch.testing.assert_close(ours.double(), dense(seen.calls), rtol=1e-5, atol=1e-6)


def test_it_stays_sparse_and_its_rows_need_no_more_than_themselves() -> None:
    index = (torch.arange(5000)[:, None] + torch.arange(3)).clamp(max=4999)
    weights = torch.rand(5000, 3, dtype=torch.float64)
    calls = [Call("", 0, 5000, None, index, weights, weights) for _ in range(4)]
    ours = convnn.sparse_rollout(calls)
    assert ours._nnz() <= 5000 * 9  # four steps of two reach nine
    row = convnn.sparse_rollout(calls, tokens=[77])
    torch.testing.assert_close(row[0, 0], ours[0].to_dense()[77])
    assert row.count_nonzero() == 9


def test_layers_that_do_not_go_together_are_refused() -> None:
    x = torch.randn(2, 3, 6, 7)
    layer = ConvNN2d(3, 3, 3, padding=1, similarity="cosine")
    with convnn.record(layer) as seen:
        layer(x)
    with pytest.raises(ValueError, match="the model has 42 queries and 72 keys"):
        convnn.sparse_rollout(seen)
    seen = recorded()
    with pytest.raises(ValueError, match="13 queries and 13 keys where the first layer has 11"):
        convnn.sparse_rollout(seen.calls)
    with pytest.raises(ValueError, match="one of the 2 recorded passes, got 2"):
        convnn.sparse_rollout(seen, forward=2)
    with pytest.raises(ValueError, match="tokens must be below"):
        convnn.sparse_rollout(seen, tokens=[13])
    with pytest.raises(ValueError, match="at least one layer"):
        convnn.sparse_rollout([])
    call = seen.calls[0]
    wrong = Call("bad", 0, call.keys, 3, call.index, call.scores, call.weights - 1)
    with pytest.raises(ValueError, match="bad has smaller ones"):
        convnn.sparse_rollout([wrong])
