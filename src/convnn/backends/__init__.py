"""Ways to run the operator, by name; every one is a record of functions held against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from convnn.backends import chunked, reference, triton
from convnn.backends.record import Backend
from convnn.cost import Cost
from convnn.names import resolve
from convnn.search import Search

__all__ = ["BACKENDS", "Backend", "Choice", "choose"]

# In the order in which "auto" asks them; the reference runs everything.
BACKENDS: dict[str, Backend] = {
    "triton": triton.BACKEND,
    "chunked": chunked.BACKEND,
    "reference": reference.BACKEND,
}


@dataclass(frozen=True)
class Choice:
    """Which backend runs given inputs, and why.

    Args:
        passed_over: the backends ``"auto"`` asked before, with the reason each gave.
        cost: what the call is expected to cost, where that was asked.
    """

    name: str
    backend: Backend
    passed_over: dict[str, str] = field(default_factory=dict)
    cost: Cost | None = None

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {reason}" for name, reason in self.passed_over.items())
        return f"{self.name} ({self.backend.about}){others}" + ("" if self.cost is None else f"\n{self.cost}")


def choose(
    backend: str | Backend, search: Search | None, value: Tensor | None = None, kernel: Tensor | None = None
) -> Choice:
    """Find the backend for these inputs: an explicit one runs or raises; only ``"auto"`` passes one over."""
    passed_over: dict[str, str] = {}
    if backend == "auto":
        for name, candidate in BACKENDS.items():
            reason = _relaxes(search, candidate)
            if candidate.waits is not None:
                reason = reason or candidate.waits(search, value, kernel)
            reason = reason or candidate.declines(search, value, kernel)
            if reason is None:
                return Choice(name, candidate, passed_over)
            passed_over[name] = reason
    name, record = ("given", backend) if isinstance(backend, Backend) else (backend, None)
    record = record or resolve("backend", name, {"auto": None, **BACKENDS})
    if not isinstance(record, Backend):
        raise TypeError(f"backend must be a name or a record of type Backend, got {backend!r}")
    reason = _relaxes(search, record) or record.declines(search, value, kernel)
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot run these inputs: {reason}")
    return Choice(name, record)


def _relaxes(search: Search | None, backend: Backend) -> str | None:
    """Why a backend cannot serve a search's selection, or None."""
    if search is None or search.selection is None or backend.relaxed is not None:
        return None
    return "it looks at the chosen keys alone, and this selection lets every key count"
