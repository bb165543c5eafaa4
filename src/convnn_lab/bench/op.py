"""The operator against torch's attention, masked KVT and the plain baseline, on one device in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.functional import convnn
from convnn_lab.bench import peers, plain
from convnn_lab.bench.check import check
from convnn_lab.bench.measure import require_device
from convnn_lab.bench.report import Contender, Row, timed

# Above so many scores the contenders that hold them all are left out.
SCORES = 2**29


@dataclass(frozen=True)
class Case:
    """Batch and heads together, tokens, channels of a head, neighbours, and candidates if not all."""

    entries: int
    tokens: int
    channels: int
    k: int
    candidates: int | None = None

    def __str__(self) -> str:
        among = "" if self.candidates is None else f", r={self.candidates}"
        return f"{self.entries}, {self.tokens}, {self.channels}, K={self.k}{among}"

    @property
    def size(self) -> tuple[int, int, int]:
        """What attention to all keys depends on."""
        return self.entries, self.tokens, self.channels


CASES = [
    *(Case(384, 197, 64, k) for k in (9, 25)),
    Case(48, 1024, 64, 9),
    Case(32, 3136, 64, 9),
    Case(12, 4096, 64, 16),
    Case(12, 16384, 64, 16),
    Case(384, 197, 64, 9, 32),
    *(Case(384, 197, 64, k) for k in (8, 36, 100)),
]


NAMES = (
    *("sdpa", "convnn", "convnn, no kernel", "plain", "kvt, masked", "kvt, flex"),
    *(f"sdpa, {name}" for name in peers.BACKENDS),
    "flex",
)


def op(cases: Sequence[Case] = CASES, only: Sequence[str] = NAMES) -> Iterator[Row]:
    """The operator alone; correctness is checked before anything is timed.

    Attention to all keys is timed in every way torch has with the first case of a size, and then as torch runs it.

    Args:
        only: the names of contenders to time.
    """
    require_device()
    sizes: set[tuple[int, int, int]] = set()
    for case in cases:
        inputs, candidates = problem(case, "cuda", torch.bfloat16)
        check(case, inputs, case.k, candidates)
        check(f"{case}, no kernel", inputs[:3], case.k, candidates)
        torch.compiler.reset()  # torch compiles a function for so many sizes only
        for contender in contenders(case, inputs, candidates, every_dense=case.size not in sizes):
            if contender.name in only:
                yield timed(str(case), contender)
        sizes.add(case.size)


def problem(case: Case, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    """Draw query, key, value ``(B, H, N, d)`` and kernel ``(d, 1, K)``, and the candidates if there are any."""
    heads = 12 if case.entries % 12 == 0 else 1
    shape = (case.entries // heads, heads, case.tokens, case.channels)
    tensors = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
    among = None if case.candidates is None else torch.randperm(case.tokens, device=device)[: case.candidates]
    return [*tensors, torch.randn(case.channels, 1, case.k, device=device, dtype=dtype)], among


def contenders(
    case: Case, inputs: Sequence[Tensor], candidates: Tensor | None = None, *, every_dense: bool = True
) -> Iterator[Contender]:
    """Whatever is compared on a case, torch's attention first."""
    heads = inputs[:3]
    ours: Callable[..., Tensor] = partial(convnn, k=case.k, candidates=candidates)
    yield Contender("sdpa", F.scaled_dot_product_attention, heads)
    yield Contender("convnn", ours, inputs, peer=False)
    yield Contender("convnn, no kernel", ours, heads, peer=False)
    few = case.entries * case.tokens**2 <= SCORES
    if few:
        yield Contender("plain", partial(plain.convnn, k=case.k, candidates=candidates), inputs)
    if few and candidates is None:
        yield Contender("kvt, masked", partial(plain.kvt, k=case.k), heads)
        yield Contender("kvt, flex", peers.flex_kvt(case.k), heads)
    if every_dense:
        for name, function in dense(few=few).items():
            yield Contender(name, function, heads)


def dense(*, few: bool) -> dict[str, Callable[..., Tensor]]:
    """Attention to all keys by each of torch's ways; with many scores, without those that hold them."""
    found = {f"sdpa, {name}": peers.sdpa(backend) for name, backend in peers.BACKENDS.items() if few or name != "math"}
    return {**found, "flex": peers.flex()}
