"""How many bytes the kernels hold at most beside the inputs: forward, and forward and backward."""

from __future__ import annotations

from convnn.backends.held import chunked
from convnn.cost import Sizes


def bytes_held(given: Sizes) -> tuple[int, int]:
    """The output, and an index and a weight for every slot; then the gradients and their inverse index.

    Measured: 6 bytes for a slot in half types, and 12 to 19 with the gradients. Keys searched in parts have a list of
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
    both = (given.results + given.inputs) * given.item + given.slots * (8 + 4 * given.item)
    if given.per_group > 1:
        rows = given.searches * (given.queries + given.keys) * given.compared
        directions = rows * (2 * given.lifted if given.weighs else given.item) if given.directed else 0
        forward += directions + (given.slots * 32 if given.weighs else 0)
        both = forward + min(given.slots * given.channels * given.item, BUDGET)
    return forward, max(forward, both)
