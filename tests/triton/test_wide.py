"""So many channels that those of a tile of queries and keys do not fit into a program at once."""

from __future__ import annotations

import pytest
import torch

from convnn.backends.triton import launch
from convnn.functional import nearest
from tests.triton.runner import DEVICE

# N, M, E and K: whole rows in one and in two pieces of columns, a stream of keys, and lists longer than it certifies.
SIZES = {
    "whole": (20, 64, 700, 5),
    "in two": (20, 36, 514, 9),
    "stream": (20, 330, 600, 7),
    "long lists": (3, 270, 300, 130),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", SIZES)
def test_channels_one_piece_after_the_other_give_the_same_neighbours(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, m, e, k = SIZES[path]
    query, key = (torch.randn(rows, e, device=DEVICE).to(dtype) for rows in (n, m))
    at_once = nearest(query, key, k=k, backend="triton")
    asked: list[int] = []

    def always(_: torch.Tensor, held: int, *__: int, **___: int) -> bool:
        asked.append(held)
        return True

    monkeypatch.setattr(launch, "rolled", always)
    rolled = nearest(query, key, k=k, backend="triton")
    assert min(asked) >= 16 * e
    torch.testing.assert_close(rolled.scores, at_once.scores, rtol=1e-5, atol=1e-5)
    exact = nearest(query.double(), key.double(), k=k, backend="reference")
    torch.testing.assert_close(rolled.scores.double(), exact.scores, rtol=1e-3, atol=1e-3)
