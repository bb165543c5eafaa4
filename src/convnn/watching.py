"""Who looks on while the operator runs: told after the output is made, so that looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, TypeAlias

import torch

from convnn.neighbors import Neighbors
from convnn.weighting import Weigh


class Sight(NamedTuple):
    """One call of the operator.

    Args:
        keys: M, how many keys there were.
        shape: of what is found, ``(..., N, K)``.
        find: finds the neighbours, again where the call did not keep them.
        weigh: weighs them; without dropout, since what was dropped is known to nobody.
    """

    keys: int
    shape: tuple[int, ...]
    find: Callable[[], Neighbors]
    weigh: Weigh


Watcher: TypeAlias = Callable[[Sight], None]
WATCHERS: ContextVar[tuple[Watcher, ...]] = ContextVar("WATCHERS", default=())


def anyone() -> bool:
    """Whether anybody looks on; never in what is compiled or exported, nor where backward computes something again."""
    if torch.compiler.is_compiling():
        return False
    return len(WATCHERS.get()) > 0 and torch._C._current_graph_task_id() == -1


def show(keys: int, shape: tuple[int, ...], find: Callable[[], Neighbors], weigh: Weigh) -> None:
    """Tell everybody who looks on."""
    sight = Sight(keys, shape, find, Weigh(weigh.weighting))
    for watcher in WATCHERS.get():
        watcher(sight)
