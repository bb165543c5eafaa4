"""What rows are called in figures, and what a figure says it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from convnn_lab.rerun.records import Going, Result

# How lines are told apart, as far as the rows of a figure differ in it.
SAID = {
    "layer": "{}",
    "candidates": "{}",
    "kernel": "{}",
    "kernel_size": "{0}x{0} kernel",
    "ratio": "λ = {}",
    "patch": "patch {}",
    "k": "k = {}",
    "r": "r = {}",
}


def series(each: Result, group: Sequence[Result], field: str) -> str:
    """What a line of points is called: what its rows have that others of the figure have not."""
    words = []
    for name, said in SAID.items():
        own = each.row.configuration.get(name)
        values = {other.row.configuration.get(name) for other in group} - {None}  # what searches nothing says nothing
        if name != field and own is not None and len(values) > 1:
            words.append(said.format(own))
    if len({"position" in other.row.configuration for other in group}) > 1:
        words.append("with positions" if "position" in each.row.configuration else "without positions")
    mixed = any(each.how != other.how for other in group)
    return ", ".join([*words, *(each.how if mixed else [])])


def named(each: Result | Going, group: Sequence[Result | Going]) -> str:
    """A row's label, and how it was run where the others were run differently."""
    same = all(each.how == other.how for other in group)
    return ", ".join([each.row.label, *([] if same else each.how)])


def about(results: Sequence[Result | Going], *, bars: bool = True) -> str:
    """What a figure is made of: how long, how precisely and how often rows were run, and what bars are, if any."""
    epochs = sorted({each.epochs for each in results})
    precisions = sorted({each.job.recipe.precision for each in results})
    seeds = sorted({len(each.seeds) for each in results})
    said = [f"{_span(epochs)} epochs", " and ".join(precisions), f"{_span(seeds)} seed{'s' * (seeds != [1])}"]
    pooled = (
        f"; means over seeds, {'bars: their standard deviation' if bars else 'thin: each'}" if seeds[-1] > 1 else ""
    )
    return f"ours: {', '.join(said)}{pooled}"


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
