"""How many bytes a backend holds at most beside the inputs: forward, and forward and backward."""

from __future__ import annotations

from convnn.backends.blocks import ELSEWHERE, ON_CPU
from convnn.cost import Sizes


def reference(given: Sizes) -> tuple[int, int]:
    """All scores, their sorted copy and its places; then K gathered rows for every query, a few times over."""
    number = given.lifted
    results = given.results * (number + given.item)
    if given.attends:
        scores = given.calls * given.queries * given.searched * number
        return 4 * scores + results, 6 * scores + results + given.inputs * number
    ranked = given.scores * (2 * number + 8)
    keys = given.searches * given.queries * given.k * given.compared * number
    values = given.slots * given.channels * number
    slots = given.slots * (4 * number + 8)
    forward = max(ranked + 2 * keys, 3 * values + slots + results)
    return forward, max(ranked + 2 * keys, 4 * values + 2 * keys + 2 * slots + results + given.inputs * number)


def chunked(given: Sizes, *, budget: int | None) -> tuple[int, int]:
    """A block of scores, or of what is gathered; kept are the values, indices, weights and the output."""
    number = given.lifted
    budget = budget or (ON_CPU if given.device == "cpu" else ELSEWHERE)
    width = given.searched if given.attends else min(given.searched, max(given.k, budget // 64))
    rows = given.calls * given.queries
    results, gradients = given.results * number, given.inputs * number
    if given.attends:
        block = max(width, min(rows * width, budget)) * number
        return 4 * block + 2 * results, 5 * block + 2 * results + gradients
    values = given.calls * given.keys * given.channels * number
    slots = given.slots * (2 * number + 8)
    keys = min(rows * given.k * given.compared, budget) * number if given.weighs else 0
    scores = given.at_once * min(rows * width, budget)
    block = max(scores, min(rows * max(given.outputs, given.channels), budget)) * number
    kept = values + results + slots
    return max(block, keys) + kept, max(block + kept, 2 * keys + kept + gradients)
