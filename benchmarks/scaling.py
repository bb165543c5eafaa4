"""How the cost of the operator grows with tokens N, neighbours K, channels C and candidates r, beside dense attention.

    python benchmarks/scaling.py [--out FILE.csv] [--sweeps n k c r maps] [--jobs 8]

Needs a CUDA device. All in bfloat16, with a softmax and a depthwise kernel, and as many heads as make some 12 * 16,384
queries; ``maps`` are kernels that mix channels: 128 maps of 32x32, by cosine, weights uniform, beside a convolution of
3x3 whose channels come last. First every case is checked on 1,024 rows of two heads, which compiles its kernels, in
several processes; then one process measures. Every row is printed and written when it is there. Dense attention is
measured once for a size, and stands beside every K and r.

    forward_us, both_us  microseconds by replay of a CUDA graph: forward, and forward with backward and all gradients
    memory_MiB           the highest point of both, above the inputs
    flops                of forward: the products and sums of the search, 2 N M C for every head (M keys, or r
                         candidates), and of the aggregation, 3 N K C with a depthwise kernel and 2 N K C O with one
                         that mixes; 4 N M C for attention, 2 N 9 C O for the convolution. Choosing counts nothing, nor
                         do weights.
    bytes                of forward: each input, the output and the index once, 2 or 4 bytes for the number of a key;
                         keys and values that are no candidates do not count, nor does what is gathered again

An empty r means all keys.
"""

from __future__ import annotations

import argparse
import csv
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from convnn.functional import convnn
from convnn_lab.bench import conv, maps, op
from convnn_lab.bench.check import check
from convnn_lab.bench.measure import Cost, release
from convnn_lab.bench.report import Contender, Row, headline, surroundings, timed

Case: TypeAlias = op.Case | conv.Case
# Queries of all heads together, and the rows of two heads that are compared with float64.
TOKENS, SAMPLE = 12 * 16_384, 1024
COLUMNS = ("sweep", "n", "k", "c", "r", "contender", "forward_us", "both_us", "memory_MiB", "flops", "bytes")


def heads(n: int, k: int = 9, c: int = 64, r: int | None = None) -> op.Case:
    """So many heads that there are ``TOKENS`` queries, in whole twelves where that is possible."""
    entries = max(1, TOKENS // n)
    return op.Case(entries - entries % 12 if entries >= 12 else entries, n, c, k, r)


SWEEPS: dict[str, list[Case]] = {
    "n": [heads(n) for n in (197, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)],
    "k": [heads(1024, k) for k in (1, 4, 9, 16, 25, 36, 64, 100)],
    "c": [heads(1024, c=c) for c in (16, 32, 64, 128, 256)],
    "r": [heads(4096, r=r) for r in (16, 32, 64, 128, 256, 512, 1024)],
    "maps": [conv.Case(128, 32, c, c) for c in (32, 64, 128, 256)],
}


def drawn(case: Case) -> list[Any]:
    """Maps, or query, key, value and kernel, and the candidates or None."""
    if isinstance(case, conv.Case):
        size = (case.batch, case.inputs, case.side, case.side)
        return [*conv.problem(case, torch.randn(size, device="cuda", dtype=torch.bfloat16))]
    inputs, among = op.problem(case, "cuda", torch.bfloat16)
    return [*inputs, among]


def contenders(case: Case, given: Sequence[Any]) -> Iterator[Contender]:
    """The peers, then ours."""
    if isinstance(case, conv.Case):
        cells, kernel = given
        # Cells with their channels last are such maps already.
        last = cells.mT.unflatten(-1, (case.side, case.side))
        taps = kernel.unflatten(-1, (3, 3)).contiguous(memory_format=torch.channels_last)
        yield Contender("conv2d", partial(F.conv2d, padding=1), [last, taps])
        yield Contender("convnn", partial(_among_themselves, case.k), given, peer=False)
        return
    *inputs, among = given
    yield Contender("sdpa", F.scaled_dot_product_attention, inputs[:3])
    if among is not None:
        yield Contender("sdpa, candidates", partial(_attend_some, among), inputs[:3])
    ours: Any = partial(convnn, k=case.k, candidates=among)
    yield Contender("convnn", ours, inputs, peer=False)


def _among_themselves(k: int, cells: Tensor, kernel: Tensor) -> Tensor:
    return maps.ours(cells, cells, kernel, k, "uniform")


def _attend_some(among: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key.index_select(-2, among), value.index_select(-2, among))


def prepare(case: Case) -> None:
    """Check a case, and run a step of it, so that its kernels are compiled and kept on disk."""
    given = drawn(case)
    if isinstance(case, conv.Case):
        cells, kernel = given
        options: Any = {"similarity": "cosine", "weighting": "uniform"}
        check(case, [cells[None], cells[None], cells[None], kernel], case.k, **options)
    else:
        *inputs, among = given
        check(case, inputs, case.k, among, rows=torch.randperm(case.tokens, device=inputs[0].device)[:SAMPLE])
    *_, ours = contenders(case, given)
    leaves = [tensor.detach().requires_grad_() for tensor in ours.inputs]
    output = ours.function(*leaves)
    torch.autograd.grad(output, leaves, torch.ones_like(output))
    with torch.no_grad():
        ours.function(*ours.inputs)
    torch.cuda.synchronize()


def prepare_all(cases: Sequence[Case], jobs: int) -> None:
    """Prepare each case once, several at a time; raise what any of them raises."""
    if jobs == 1:
        for case in cases:
            prepare(case)
            release()
        return
    with ProcessPoolExecutor(min(jobs, len(cases)), mp_context=get_context("spawn")) as pool:
        for _ in pool.map(prepare, cases):
            pass


def measured(sweeps: Iterable[str]) -> Iterator[tuple[str, Case, Row]]:
    """Measure what is compared; what does not depend on what changed is not measured again."""
    known: dict[object, Row] = {}
    for sweep in sweeps:
        for case in SWEEPS[sweep]:
            for contender in contenders(case, drawn(case)):
                is_dense = contender.name == "sdpa" and isinstance(case, op.Case)
                what = (contender.name, case.size if is_dense else case)  # type: ignore[union-attr]
                if what not in known:
                    known[what] = timed(str(case), contender)
                yield sweep, case, known[what]


def counted(case: Case, contender: str) -> tuple[int, int]:
    """Operations and bytes of a forward pass, as the first lines of this file say."""
    if isinstance(case, conv.Case):
        rows, keys, c, o = case.batch * case.side**2, case.side**2, case.inputs, case.outputs
        flops, numbers = 2 * rows * 9 * c * o, rows * (c + o) + 9 * c * o
        if contender == "conv2d":
            return flops, 2 * numbers
        return 2 * rows * keys * c + 2 * rows * case.k * c * o, 2 * (numbers + (case.k - 9) * c * o + rows * case.k)
    n, c, k = case.tokens, case.channels, case.k
    rows, width = case.entries * n, n if case.candidates is None or contender == "sdpa" else case.candidates
    numbers = 2 * c * (rows + case.entries * width)
    if contender.startswith("sdpa"):
        return 4 * rows * width * c, 2 * numbers
    of_index = 2 if n <= torch.iinfo(torch.int16).max else 4
    return 2 * rows * width * c + 3 * rows * k * c, 2 * (numbers + k * c) + of_index * rows * k


def cells_of(sweep: str, case: Case, row: Row) -> list[Any]:
    """A row of the table, up to why something was left out."""
    if isinstance(case, conv.Case):
        sizes: tuple[int | None, ...] = (case.side**2, case.k, case.inputs, None)
    else:
        sizes = (case.tokens, case.k, case.channels, case.candidates)
    costs: tuple[str, ...] = ("", "", "")
    if isinstance(row.cost, Cost):
        costs = tuple(f"{number:.2f}" for number in (row.cost.forward, row.cost.both, row.cost.memory_both))
    named = ["" if size is None else size for size in sizes]
    return [sweep, *named, row.contender, *costs, *counted(case, row.contender), row.skipped]


def show(rows: Iterable[list[Any]], into: Path | None) -> None:
    """Print and write each row when it is there."""
    about = surroundings()
    print(headline(about))
    print("".join(f"{name:>{18 if name == 'contender' else 12}}" for name in COLUMNS), flush=True)
    with nullcontext() if into is None else into.open("w", newline="") as file:
        writer = None if file is None else csv.writer(file)
        if writer is not None:
            writer.writerow([*COLUMNS, "skipped", *about])
        for *numbers, skipped in rows:
            line = "".join(f"{number:>{18 if place == 5 else 12}}" for place, number in enumerate(numbers[:9]))
            print(line, *(f"{number:12.3e}" for number in numbers[9:]), skipped, flush=True)
            if writer is not None and file is not None:
                writer.writerow([*numbers, skipped, *about.values()])
                file.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a table as CSV, written row by row")
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS), metavar="SWEEP")
    parser.add_argument("--jobs", type=int, default=8, help="processes that check and compile side by side")
    given = parser.parse_args()
    if given.jobs < 1:
        parser.error(f"--jobs must be 1 or more, got {given.jobs}")
    if given.out is not None and not given.out.parent.is_dir():
        parser.error(f"--out must be in a folder that exists, got {given.out}")
    if not torch.cuda.is_available():
        parser.error("scaling is measured on a CUDA device, and there is none here")
    torch.manual_seed(0)
    sweeps = dict.fromkeys(given.sweeps)
    cases = list(dict.fromkeys(case for sweep in sweeps for case in SWEEPS[sweep]))
    prepare_all(cases, given.jobs)
    # What is there by now stays, and is not looked through before every measurement of memory.
    gc.freeze()
    show((cells_of(*each) for each in measured(sweeps)), given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
