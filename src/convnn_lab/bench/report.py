"""The table a benchmark prints and writes: one contender on one case in a row, and what it was measured on."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from convnn_lab.bench.measure import Cost, Function, Training, cost, release


@dataclass(frozen=True)
class Contender:
    """A function of inputs to be measured, with parameters that want gradients too.

    A peer may be unable to run here, which is said in its row; whatever is not a peer must run.
    """

    name: str
    function: Function
    inputs: Sequence[Tensor]
    parameters: Sequence[Tensor] = ()
    peer: bool = True


@dataclass(frozen=True)
class Row:
    """One contender on one case: its cost, or why it was left out."""

    case: str
    contender: str
    cost: Cost | Training | None
    skipped: str = ""


def timed(case: str, contender: Contender, measure: Callable[..., Cost | Training] | None = None) -> Row:
    """Measure a contender, by ``cost`` unless told; a peer that cannot run is left out with its reason."""
    measured = cost if measure is None else measure
    try:
        return Row(case, contender.name, measured(contender.function, contender.inputs, contender.parameters))
    except Exception as error:  # whatever a compiler, a driver or torch raises
        if not contender.peer:
            raise
        lines = str(error).strip().splitlines()
        return Row(case, contender.name, None, f"{type(error).__name__}: {lines[0] if lines else ''}"[:200])
    finally:
        release()


def surroundings() -> dict[str, str]:
    """What the numbers depend on: device, releases, commit."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    said = {"device": device, "torch": torch.__version__, "triton": "none", "cuda": torch.version.cuda or "none"}
    if find_spec("triton") is not None:
        import triton  # noqa: PLC0415

        said["triton"] = triton.__version__
    return {**said, "commit": _commit()}


def _commit() -> str:
    call = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def headline(about: dict[str, str]) -> str:
    """The surroundings in a line."""
    return ", ".join(value if name == "device" else f"{name} {value}" for name, value in about.items())


def show(rows: Iterable[Row], into: Path | None, kind: type[Cost] | type[Training] = Cost) -> None:
    """Print a table as it is measured, with the ratios to the first row of a case, and write it as CSV."""
    about, out, names = surroundings(), sys.stdout.write, [field.name for field in fields(kind)]
    out(f"{headline(about)}\nmicroseconds (graph, eager) and MiB above the inputs; ratios to the first of a case,")
    out(f" {' / '.join(names[:3])}\n\n")
    out(f"{'case':30}{'contender':24}" + "".join(f"{name.replace('memory', 'MiB'):>15}" for name in names))
    out(f"{'ratios':>22}\n")
    base: dict[str, dict[str, float]] = {}
    with nullcontext() if into is None else into.open("w", newline="") as file:
        writer = None if file is None else csv.writer(file)
        if writer is not None:
            writer.writerow(["case", "contender", *names, "skipped", *about])
        for row in rows:
            numbers = {} if row.cost is None else asdict(row.cost)
            out(f"{row.case:30}{row.contender:24}")
            out(f"{_cells(numbers, base.setdefault(row.case, numbers)) if numbers else f'  skipped: {row.skipped}'}\n")
            sys.stdout.flush()
            if writer is not None and file is not None:
                cells = [numbers.get(name, "") for name in names]
                writer.writerow([row.case, row.contender, *cells, row.skipped, *about.values()])
                file.flush()


def _cells(numbers: dict[str, float], first: dict[str, float]) -> str:
    ratios = [numbers[name] / max(first[name], 1e-3) for name in list(numbers)[:3]]
    cells = "".join(f"{number:15.1f}" for number in numbers.values())
    return f"{cells}{' / '.join(f'{ratio:.2f}' for ratio in ratios):>22}"
