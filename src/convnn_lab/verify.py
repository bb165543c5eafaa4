"""The central claim as a table: the operator, configured as X, against torch's own X."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isnan
from platform import python_version
from typing import TypeAlias

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

import convnn
from convnn.functional import convnn as operator

TOLERANCE = 1e-12  # the cases are float64

Case: TypeAlias = Callable[[str], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    """One comparison: how many random cases on how many backends, and the largest difference among them."""

    operator: str
    peer: str
    cases: int
    largest_difference: float
    worst: str

    @property
    def holds(self) -> bool:
        """Whether every case agreed; a NaN does not."""
        return self.largest_difference <= TOLERANCE


def compare(cases: int, seed: int) -> list[Row]:
    """Compare on ``cases`` random problems for each row, on every backend."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [_row(configured, peer, case, cases, seed) for (configured, peer), case in COMPARISONS.items()]
    finally:
        torch.set_default_dtype(before)


def show(rows: list[Row]) -> None:
    """Print the table, and how to repeat what failed."""
    table = Table(title=f"convnn {convnn.__version__} against torch {torch.__version__}, float64", box=SIMPLE)
    table.add_column("the operator with")
    table.add_column("equals")
    table.add_column("cases", justify="right")
    table.add_column("differs by", justify="right")
    table.add_column("verdict")
    for row in rows:
        verdict = "equal" if row.holds else "[bold red]DIFFERS"
        table.add_row(row.operator, row.peer, str(row.cases), f"{row.largest_difference:.1e}", verdict)
    console = Console()
    console.print(table)
    for row in rows:
        if not row.holds:
            console.print(f"{row.peer} differs by {row.largest_difference:.1e} at {row.worst}")


def as_json(rows: list[Row], cases: int, seed: int) -> str:
    """Write the table for machines."""
    versions = {"convnn": convnn.__version__, "torch": torch.__version__, "python": python_version()}
    table = [{**asdict(row), "holds": row.holds} for row in rows]
    whole = {"holds": all(row.holds for row in rows), "tolerance": TOLERANCE, "cases": cases, "seed": seed}
    return json.dumps({**whole, "versions": versions, "rows": table}, indent=2) + "\n"


def _row(configured: str, peer: str, case: Case, cases: int, seed: int) -> Row:
    largest, worst = 0.0, ""
    for number in range(cases):
        for backend in convnn.backends.BACKENDS:
            torch.manual_seed(seed + number)
            ours, theirs = case(backend)
            difference = (ours - theirs).abs().max().item()
            # Nothing is larger than a NaN, and the first one stays.
            if not isnan(largest) and (isnan(difference) or difference > largest):
                largest, worst = difference, f"backend {backend}, --seed {seed + number} --cases 1"
    return Row(configured, peer, cases * len(convnn.backends.BACKENDS), largest, worst)


def _between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, keys, channels = (_between(1, top) for top in (3, 4, 20, 20, 16))
    lead = (batch, heads)
    return torch.randn(*lead, queries, 8), torch.randn(*lead, keys, 8), torch.randn(*lead, keys, channels)


def attention(backend: str) -> tuple[Tensor, Tensor]:
    """All keys, softmax."""
    query, key, value = _tokens()
    return operator(query, key, value, k="all", backend=backend), F.scaled_dot_product_attention(query, key, value)


def causal_attention(backend: str) -> tuple[Tensor, Tensor]:
    """All keys up to one's own."""
    query, key, value = _tokens()
    ours = operator(query, key, value, k="all", mask="causal", backend=backend)
    return ours, F.scaled_dot_product_attention(query, key, value, is_causal=True)


def biased_attention(backend: str) -> tuple[Tensor, Tensor]:
    """A float mask: added, or forbidding; some queries are left with nothing."""
    query, key, value = _tokens()
    bias = torch.randn(query.shape[-2], key.shape[-2])
    bias = bias.masked_fill(torch.rand(bias.shape) < 0.5, -torch.inf)
    ours = operator(query, key, value, k="all", mask=bias, backend=backend)
    return ours, F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def nearest_attention(backend: str) -> tuple[Tensor, Tensor]:
    """The k nearest keys only; torch is told by a mask which they are."""
    query, key, value = _tokens()
    k = _between(1, key.shape[-2])
    weakest = (query @ key.mT).sort(dim=-1, descending=True).values[..., k - 1, None]
    ours = operator(query, key, value, k=k, backend=backend)
    return ours, F.scaled_dot_product_attention(query, key, value, attn_mask=query @ key.mT >= weakest)


def convolution(axes: int, groups: str) -> Case:
    """Make a case of keys that are padded pixels, queries that are window centres, nearness in space."""

    def case(backend: str) -> tuple[Tensor, Tensor]:
        # The nearest pixels by Euclidean distance fill a square for sides 1, 3 and 5, and a line for every length.
        side = _between(1, 6) if axes == 1 else 1 + 2 * _between(0, 2)
        stride, padding = _between(1, 3), _between(0, side)
        size = [_between(side, 12) for _ in range(axes)]
        channels = 2 * _between(1, 3)
        n_groups = {"one": 1, "two": 2, "each": channels}[groups]
        image = torch.randn(2, channels, *size)
        kernel, bias = torch.randn(2 * n_groups, channels // n_groups, *[side] * axes), torch.randn(2 * n_groups)

        padded = F.pad(image, [padding] * 2 * axes)
        pixels = _grid([torch.arange(n) for n in padded.shape[2:]])
        starts = [torch.arange(0, n - side + 1, stride) for n in padded.shape[2:]]
        ours = operator(
            _grid(starts) + (side - 1) / 2,
            pixels + 0.0,
            padded.flatten(2).mT,
            kernel.flatten(2),
            bias,
            k=side**axes,
            similarity="sqeuclidean",
            weighting="uniform",
            order="key",
            backend=backend,
        )
        torch_convolution = (F.conv1d, F.conv2d)[axes - 1]
        theirs = torch_convolution(image, kernel, bias, stride=stride, padding=padding, groups=n_groups)
        return ours.mT, theirs.flatten(2)

    return case


def _grid(axes: list[Tensor]) -> Tensor:
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


COMPARISONS: dict[tuple[str, str], Case] = {
    ("features, all, softmax", "self-attention"): attention,
    ("… a causal mask", "causal attention"): causal_attention,
    ("… a float mask", "masked attention"): biased_attention,
    ("features, k, softmax", "KVT attention"): nearest_attention,
    ("space, R, uniform", "Conv1d"): convolution(1, "one"),
    ("space, R², uniform", "Conv2d"): convolution(2, "one"),
    ("… kernel in groups", "grouped Conv2d"): convolution(2, "two"),
    ("… kernel by channel", "depthwise Conv2d"): convolution(2, "each"),
}
