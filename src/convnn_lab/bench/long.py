"""The operator over many keys against torch's attention: long rows, few queries, and rules of who may be chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.functional import convnn
from convnn.masks import Rule, causal, window
from convnn_lab.bench.check import check
from convnn_lab.bench.measure import require_device
from convnn_lab.bench.report import Contender, Row, timed

# So many rows are compared with float64.
SAMPLE = 1024


@dataclass(frozen=True)
class Case:
    """Heads, queries, keys, channels of a head, neighbours; whether only the past is seen, and how far back."""

    heads: int
    queries: int
    keys: int
    channels: int = 64
    k: int = 16
    is_causal: bool = False
    back: int | None = None

    def __str__(self) -> str:
        sizes = f"{self.queries}" if self.queries == self.keys else f"{self.queries} of {self.keys}"
        rule = "" if not self.is_causal else ", causal" if self.back is None else f", last {self.back}"
        return f"{self.heads}, {sizes}, {self.channels}, K={self.k}{rule}"

    @property
    def rules(self) -> list[Rule]:
        """Who may be chosen, where that is not everyone."""
        return [*([causal] if self.is_causal else []), *([] if self.back is None else [window(self.back)])]


CASES = [
    Case(12, 16384, 16384),
    Case(12, 65536, 65536),
    Case(1, 1000, 1_000_000),
    Case(12, 16384, 16384, is_causal=True),
    Case(12, 16384, 16384, is_causal=True, back=512),
]


def long(cases: Sequence[Case] = CASES) -> Iterator[Row]:
    """The operator with a depthwise kernel and without; a sample of rows is checked before anything is timed."""
    require_device()
    for case in cases:
        inputs = problem(case, "cuda", torch.bfloat16)
        checked(case, inputs)
        for contender in contenders(case, inputs):
            yield timed(str(case), contender)
        del inputs, contender


def checked(case: Case, inputs: Sequence[Tensor]) -> None:
    """Raise where the operator is not right in some rows that have K keys to choose from."""
    first = case.k if case.is_causal else 0
    rows = first + torch.randperm(case.queries - first, device=inputs[0].device)[:SAMPLE]
    check(case, inputs, case.k, rules=case.rules, rows=rows)
    check(f"{case}, no kernel", inputs[:3], case.k, rules=case.rules, rows=rows)


def problem(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Draw a query ``(1, H, N, d)``, key and value ``(1, H, M, d)`` and a kernel ``(d, 1, K)``."""
    factory: Any = {"device": device, "dtype": dtype}
    tokens = [torch.randn(1, case.heads, n, case.channels, **factory) for n in (case.queries, case.keys, case.keys)]
    return [*tokens, torch.randn(case.channels, 1, case.k, **factory)]


def contenders(case: Case, inputs: Sequence[Tensor]) -> Iterator[Contender]:
    """Whatever is compared on a case, torch's attention first; behind a window it sees the whole past."""
    ours: Any = partial(convnn, k=case.k, mask=case.rules or None)
    dense: Any = partial(F.scaled_dot_product_attention, is_causal=case.is_causal)
    yield Contender("sdpa, causal" if case.is_causal else "sdpa", dense, inputs[:3])
    yield Contender("convnn", ours, inputs, peer=False)
    yield Contender("convnn, no kernel", ours, inputs[:3], peer=False)
