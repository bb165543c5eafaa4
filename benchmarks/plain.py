"""Time the plain PyTorch baseline alone, at the thesis's size.

    python benchmarks/plain.py [--batch 32] [--k 9]

``convnn bench op`` times it beside the kernels and torch's attention.
"""

from __future__ import annotations

import argparse

import torch

from convnn_lab.bench import measure, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--k", type=int, default=9)
    given = parser.parse_args()
    leaves = [torch.randn(given.batch, 12, 197, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    kernel = torch.randn(64, 1, given.k, device="cuda", dtype=torch.bfloat16)
    cost = measure.cost(lambda q, k, v, w: plain.convnn(q, k, v, w, given.k), [*leaves, kernel])
    print(cost)


if __name__ == "__main__":
    main()
