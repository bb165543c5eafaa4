"""Anneal a trained vision transformer from attention to all tokens down to the nine nearest.

    python benchmarks/morph_vit.py DATA [--device cuda] [--epochs 4] [--train 60000] [--kernel] [--output FOLDER]

DATA holds ``models/vit_mnist.safetensors`` and MNIST's IDX files somewhere under ``mnist/``. With ``--kernel`` every
layer has a depthwise kernel of a tap for every rank, which starts at 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convnn import ConvNNAttention, morph
from convnn_lab.data import idx
from convnn_lab.pretrained.vit_mnist import vit_mnist
from convnn_lab.train.tuning import Look, accuracy, draw, tell, tune, write

TOKENS = 50


def mnist(folder: Path, kind: str, count: int) -> tuple[Tensor, Tensor]:
    found = {name: sorted((folder / "mnist").rglob(f"{kind}-{name}-ubyte*")) for name in ("images-idx3", "labels-idx1")}
    if not all(found.values()):
        raise SystemExit(f"there must be {kind}-images-idx3-ubyte and its labels under {folder / 'mnist'}")
    images, labels = (torch.tensor(idx.read(paths[0])) for paths in found.values())
    return images[:count, None], labels[:count].long()


def prepared(images: Tensor) -> Tensor:
    return (images.float() / 255 - 0.1307) / 0.3081


def converted(path: Path, kernel: bool) -> nn.Module:
    """The transformer with ConvNN attention in it, which starts as the attention that was there."""
    model: Any = vit_mnist(path)
    for block in model.blocks:
        kind: dict[str, Any] = {"k": TOKENS, "kernel": "depthwise"} if kernel else {"k": "all", "kernel": None}
        layer = ConvNNAttention(64, 4, attn_head_dim=64, **kind)
        layer.load_state_dict(block.attn.state_dict(), strict=not kernel)
        block.attn = layer
    return model


def variants(epochs: int, kernel: bool) -> dict[str, Any]:
    everybody: Any = TOKENS if kernel else "all"
    part = epochs / 4
    return {
        "k from 50 by 25 to 9": {"k": morph.stages({0: everybody, part: 25, 2 * part: 9})},
        "k = 9 from the start": {"k": morph.stages({0: 9})},
        "all tokens": {"k": morph.stages({0: everybody})},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--train", type=int, default=60_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--looks", type=int, default=2)
    parser.add_argument("--kernel", action="store_true")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    path = given.data / "models" / "vit_mnist.safetensors"
    train, test = mnist(given.data, "train", given.train), mnist(given.data, "t10k", given.test)
    train, test = ((images.to(given.device), labels.to(given.device)) for images, labels in (train, test))
    model = converted(path, given.kernel).to(given.device)
    start = accuracy(model, *test, prepared)
    print(f"attention to all tokens   {100 * start:.2f} %", flush=True)
    for k in (25, 9):
        morph.apply(model, k=k)
        print(f"k = {k} without training   {100 * accuracy(model, *test, prepared):.2f} %", flush=True)
    runs: dict[str, list[Look]] = {}
    for name, schedules in variants(given.epochs, given.kernel).items():
        model = converted(path, given.kernel).to(given.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.01)
        options: Any = {"epochs": given.epochs, "batch": given.batch, "looks": given.looks, "prepare": prepared}
        runs[name] = tell(name, tune(model, train, test, optimizer=optimizer, schedules=schedules, **options))
    if given.output is not None:
        name = "morph-vit-kernel" if given.kernel else "morph-vit"
        draw(given.output / f"{name}.svg", runs, level=start, said="attention, as it was trained")
        write(given.output / f"{name}.csv", runs)


if __name__ == "__main__":
    main()
