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


def triton(given: Sizes) -> tuple[int, int]:
    """The output, and an index and a weight for every slot; then the gradients and their inverse index.

    Measured: 6 bytes for a slot in half types, and 25 to 43 with the gradients. Keys searched in parts have a list of
    slots for each. Kernels that mix channels hold directions, and backward as many gathered values as they may.
    """
    from convnn.backends.triton.mix_steps import BUDGET  # noqa: PLC0415
    from convnn.backends.triton.sizes import parts_of  # noqa: PLC0415

    if not given.fused:
        return chunked(given, budget=None)
    if given.attends:
        return given.results * given.item, 2 * (given.results + given.inputs) * given.item
    whole = given.searched == given.keys
    parts = parts_of(given.searches, given.queries, given.searched, given.k, given.item == 4) if whole else 1
    lists = parts * given.searches * given.queries * given.k * 8 if parts > 1 else 0
    forward = given.results * given.item + given.slots * (4 + given.item) + lists
    both = (given.results + given.inputs) * given.item + given.slots * (24 + 3 * given.item)
    if given.per_group > 1:
        rows = given.searches * (given.queries + given.keys) * given.compared
        directions = rows * (2 * given.lifted if given.weighs else given.item) if given.directed else 0
        forward += directions + (given.slots * 32 if given.weighs else 0)
        both = forward + min(given.slots * given.channels * given.item, BUDGET)
    return forward, max(forward, both)
