"""What a call costs, counted from sizes alone: multiply-adds, bytes moved, bytes held, and about how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from convnn import forms
from convnn.forms import FUSED, PRODUCTS
from convnn.neighbors import together, wide
from convnn.search import Search
from convnn.similarity import cosine, pearson
from convnn.weighting import Weigh


@dataclass(frozen=True)
class Sizes:
    """The sizes of a problem, with the letters of the operator spelled out.

    Args:
        searches: how many searches, a leading entry each; ``calls`` are the leading entries of the output.
        searched: how many keys a query looks at: the candidates, or all.
        per_group: how many channels an output is made of; 0 without a kernel.
        item, lifted: bytes of a number of the inputs, and of one that is computed with.
        weighs: whether a weight depends on scores, so that the chosen pairs are scored again and have gradients.
        attends: whether all keys are weighed and nothing is chosen.
        at_once: how many tensors of the size of the scores a similarity holds at once; distances and masks take more.
        directed: whether queries and keys are brought to one length before they are compared.
        fused: whether kernels know the similarity and take as many neighbours; if not, ``chunked`` searches for them.
    """

    searches: int
    calls: int
    queries: int
    keys: int
    searched: int
    k: int
    compared: int
    channels: int
    outputs: int
    per_group: int
    item: int
    lifted: int
    device: str
    weighs: bool
    attends: bool
    at_once: int = 1
    directed: bool = False
    fused: bool = True

    @property
    def scores(self) -> int:
        """How many pairs the search scores."""
        return self.searches * self.queries * self.searched

    @property
    def slots(self) -> int:
        """How many slots are combined."""
        return self.calls * self.queries * self.k

    @property
    def inputs(self) -> int:
        """How many numbers queries, keys and values have together."""
        compared = self.searches * (self.queries + self.keys) * self.compared
        return compared + self.calls * self.keys * self.channels

    @property
    def results(self) -> int:
        """How many numbers the output has."""
        return self.calls * self.queries * self.outputs


Held: TypeAlias = Callable[[Sizes], tuple[int, int]]


def sizes(search: Search, value: Tensor, kernel: Tensor | None, weigh: Weigh, *, attends: bool) -> Sizes:
    """Read the sizes off a problem; no number of it is looked at."""
    lead = together(search.query.shape[:-2], search.key.shape[:-2])
    return Sizes(
        searches=prod(lead),
        calls=prod(together(lead, value.shape[:-2])),
        queries=search.query.shape[-2],
        keys=search.key.shape[-2],
        searched=search.width,
        k=search.k,
        compared=search.query.shape[-1],
        channels=value.shape[-1],
        outputs=value.shape[-1] if kernel is None else kernel.shape[0],
        per_group=0 if kernel is None else kernel.shape[1],
        item=value.element_size(),
        lifted=wide(torch.empty(0, dtype=value.dtype, device="meta")).element_size(),
        device="cpu" if value.device.type == "meta" else value.device.type,
        weighs=not weigh.ignores_scores,
        attends=attends,
        at_once=(1 if search.similarity in PRODUCTS else 3) + min(1, len(search.mask)),
        directed=search.similarity in (cosine, pearson),
        fused=forms.known(search.similarity) and (attends or search.others <= FUSED),
    )


@dataclass(frozen=True)
class Rates:
    """How fast a kind of device is, by the second; the figures are for one thread where there are threads.

    Args:
        products: multiply-adds; scores: numbers a search ranks; moved: bytes gathered; start: seconds of any call.
    """

    products: float
    scores: float
    moved: float
    start: float


# docs/performance.md, "What a call costs", says what these were measured on.
RATES = {
    ("cpu", "chunked"): Rates(3e10, 3.5e8, 4e9, 6e-4),
    ("cpu", "reference"): Rates(3e10, 2e7, 1e9, 3e-4),
    ("cuda", "triton"): Rates(1e14, 1.5e12, 4e12, 5e-4),
    ("cuda", "chunked"): Rates(3e13, 7e10, 1e12, 2e-3),
    ("cuda", "reference"): Rates(3e13, 2e10, 3e11, 1e-3),
}


@dataclass(frozen=True)
class Cost:
    """What a call is expected to cost.

    Args:
        scores: the pairs the search looks at.
        search_products, combine_products: multiply-adds of the search, and of the combination with the kernel.
        gathered_bytes: what is fetched by index in a forward pass: the chosen values, and keys scored again.
        forward_bytes, training_bytes: the most bytes held at once beside the inputs, in a forward pass without
            gradients, and in forward and backward with all of them; None for a backend that does not say.
        forward_seconds, training_seconds: about how long, by a factor of a few; None for an unknown device.
    """

    scores: int
    search_products: int
    combine_products: int
    gathered_bytes: int
    forward_bytes: int | None
    training_bytes: int | None
    forward_seconds: float | None
    training_seconds: float | None

    def __str__(self) -> str:
        said = [_both("{}", word(self.forward_seconds), word(self.training_seconds))]
        if self.forward_bytes is not None and self.training_bytes is not None:
            said.append(_both("{} MiB held", f"{self.forward_bytes / 2**20:.1f}", f"{self.training_bytes / 2**20:.1f}"))
        said.append(f"{self.search_products:.2g} multiply-adds to search and {self.combine_products:.2g} to combine")
        return "; ".join(said) + f"; {self.gathered_bytes / 2**20:.1f} MiB gathered"


def word(seconds: float | None) -> str:
    """The class of a time.

    Example:
        >>> word(2e-5), word(0.3), word(4.0), word(None)
        ('microseconds', 'milliseconds', 'seconds', 'unknown time')
    """
    if seconds is None:
        return "unknown time"
    return "microseconds" if seconds < 1e-3 else "milliseconds" if seconds < 1 else "seconds"


def _both(form: str, forward: str, training: str) -> str:
    return f"forward {form.format(forward)}, with backward {form.format(training)}"


def estimate(given: Sizes, backend: str, held: Held | None) -> Cost:
    """Count what a problem costs on a backend of this name."""
    search = given.scores * given.compared
    if given.attends:
        combined, gathered = given.calls * given.queries * given.searched * given.channels, 0
    else:
        combined = given.slots * (given.outputs * given.per_group or given.channels)
        again = given.searches * given.queries * given.k * given.compared if given.weighs else 0
        gathered = (given.slots * given.channels + again) * (given.item if backend == "triton" else given.lifted)
    forward_bytes, training_bytes = (None, None) if held is None else held(given)
    times = _seconds(given, backend, search, combined, gathered)
    return Cost(given.scores, search, combined, gathered, forward_bytes, training_bytes, *times)


def _seconds(given: Sizes, backend: str, search: int, combined: int, gathered: int) -> tuple[float | None, ...]:
    """The sum of what each part needs at the rate of its kind; backward gathers four times, and multiplies twice."""
    fused = given.fused or backend != "triton"
    rates = RATES.get((given.device, backend if backend != "given" and fused else "chunked"))
    if rates is None:
        return None, None
    threads = torch.get_num_threads() if given.device == "cpu" else 1
    ranked = given.scores / rates.scores
    if given.attends:  # weighed and not ranked, which no backend sorts for
        ranked = given.scores / RATES[given.device, "triton" if backend == "triton" else "chunked"].scores
    elif given.device == "cpu" and backend != "reference":  # among few keys there is more to put in order
        first = given.searches * given.queries * min(given.searched, 16 * given.k)
        ranked = (given.scores + 2 * first) / rates.scores
    elif backend == "triton" and given.fused:  # lists of more than a few neighbours fill as they grow
        ranked *= max(1.0, given.k / 16)
    directing = 0.0
    if given.directed and given.weighs and given.device == "cuda":  # in float32, step by step
        directing = 10 * given.searches * (given.queries + given.keys) * given.compared * given.lifted / rates.moved
        search *= 4
    searching = max(search / rates.products, ranked) if given.device == "cuda" else search / rates.products + ranked
    combining, moving = combined / rates.products, gathered / rates.moved
    forward = rates.start + (searching + directing + combining + moving) / threads
    # Attention to all keys multiplies by every score again.
    again = 2 * search / rates.products if given.attends else 2 * directing
    return forward, forward + rates.start + (2 * combining + 4 * moving + again) / threads
