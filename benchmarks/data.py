"""What reading an epoch of CIFAR-sized images from memory costs, beside training VGG-11 on it.

python benchmarks/data.py [--layer conv] [--precision tf32]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convnn_lab.recipes import RECIPES
from convnn_lab.train import fit, surroundings
from convnn_lab.train.source import Prepare, Share, load


def images(folder: Path, train: int = 50_000, test: int = 10_000) -> Path:
    draw, path = np.random.default_rng(0), folder / "cifar10.npz"
    arrays: dict[str, Any] = {}
    for name, count in (("train", train), ("test", test)):
        arrays[f"x_{name}"] = draw.integers(0, 256, (count, 32, 32, 3), np.uint8)
        arrays[f"y_{name}"] = draw.integers(0, 10, count)
    np.savez(path, **arrays)
    return path


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def read(recipe: Any, epochs: int = 5) -> float:
    """Seconds an epoch takes if nothing learns from it."""
    device = surroundings.device_of(recipe)
    source = load(recipe, device)
    prepare, times = Prepare(source.mean, source.std, source.size).to(device), []
    for epoch in range(epochs):
        wait(device)
        began = time.perf_counter()
        for batch, _ in source.train(epoch, 0, Share(recipe.batch)):
            prepare(batch)
        wait(device)
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--layer", default="conv")
    asked.add_argument("--precision", default="tf32")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = replace(
            RECIPES["vgg11-cifar10"],
            layer=given.layer,
            precision=given.precision,
            epochs=3,
            data_dir=images(Path(folder)),
        )
        data = read(recipe)
        run = fit.train("vgg11-cifar10", recipe, Path(folder) / "run", quiet=True)
        whole = min(row["seconds"] for row in run.rows())
    place, share = surroundings.device_of(recipe), 100 * data / whole
    print(f"{place}, {given.layer}, {given.precision}: data {data:.4f} s of an epoch of {whole:.3f} s, {share:.2f} %")


if __name__ == "__main__":
    main()
