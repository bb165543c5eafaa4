"""Kernels that are launched one after the other, and compiled side by side the first time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from convnn.backends.triton.sizes import interpreted

_seen: set[Any] = set()


class Launch(NamedTuple):
    """A kernel, its grid, its tensors and numbers, and what it is compiled for."""

    kernel: Any
    grid: tuple[int, ...]
    given: Sequence[Any]
    choices: dict[str, Any]

    def run(self) -> None:
        """Launch it, and compile it before if nobody has."""
        self.kernel[self.grid](*self.given, **self.choices)

    def compile(self, device: int) -> None:
        """Only compile it."""
        with torch.cuda.device(device):
            self.kernel.warmup(*self.given, grid=self.grid, **self.choices)


def run(launches: Sequence[Launch]) -> None:
    """Launch kernels in this order."""
    if len(launches) > 1 and not interpreted():
        first = launches[0].given[0]
        kind = (first.device.index, first.dtype, *launches[0].choices.values())
        if kind not in _seen:
            with ThreadPoolExecutor(len(launches)) as pool:
                list(pool.map(lambda each: each.compile(first.device.index), launches))
            _seen.add(kind)
    for each in launches:
        each.run()
