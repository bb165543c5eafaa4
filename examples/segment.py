"""Say of every pixel which digit it belongs to: layers that map H x W to H x W, on canvases of any size.

Digits of scikit-learn stand at random places on a noisy canvas. Three nets that differ in one layer learn to label the
pixels (plain convolutions, hybrid layers, ConvNN), and are tested on canvases of another size than they have seen.

python examples/segment.py --picture segments.png
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

from convnn.models.factories import CONVOLUTIONS

CLASSES = 11  # the background, and ten digits
OPTIONS: dict[str, dict[str, Any]] = {"conv": {}, "hybrid": {"ratio": 0.25}, "convnn": {}}


def canvases(count: int, size: tuple[int, int], digits: int, part: slice, seed: int) -> tuple[Tensor, Tensor]:
    """Canvases ``(N, 1, H, W)`` with digits at random places, and the class of every pixel ``(N, H, W)``.

    Args:
        part: which of scikit-learn's digits to draw from.
    """
    given, drawn = load_digits(), np.random.default_rng(seed)
    images, classes = given.images[part] / 16, given.target[part]
    height, width = size
    canvas, labels = np.zeros((count, height, width)), np.zeros((count, height, width), np.int64)
    for number in range(count):
        for _ in range(digits):
            chosen = drawn.integers(len(images))
            row, column = drawn.integers(height - 7), drawn.integers(width - 7)
            ink = images[chosen] > 0.3
            # What was drawn before stays in front.
            window = labels[number, row : row + 8, column : column + 8]
            if (window > 0).any():
                continue
            canvas[number, row : row + 8, column : column + 8] += images[chosen]
            window[ink] = classes[chosen] + 1
    canvas += 0.15 * drawn.standard_normal(canvas.shape)
    return torch.from_numpy(canvas).float()[:, None], torch.from_numpy(labels)


def net(layer: str, width: int) -> nn.Module:
    """Two layers of one kind between others that are the same for all; no stride, no size."""
    make = CONVOLUTIONS[layer]

    def block(channels: int, of: nn.Module) -> nn.Sequential:
        return nn.Sequential(of, nn.BatchNorm2d(channels), nn.ReLU())

    first = [block(width, nn.Conv2d(channels, width, 3, padding=1)) for channels in (1, width)]
    inner = [block(width, make(width, width, **OPTIONS[layer])) for _ in range(2)]
    return nn.Sequential(*first, *inner, nn.Conv2d(width, CLASSES, 1))


def learned(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train a net; the background, which is most of a canvas, counts less."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    steps = epochs * -(-len(images) // 8)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    weight = torch.tensor([0.2, *[1.0] * (CLASSES - 1)])
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(8):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch], weight).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def segmented(model: nn.Module, images: Tensor) -> Tensor:
    """The class of every pixel, ``(N, H, W)``."""
    return torch.cat([model.eval()(part).argmax(1) for part in images.split(8)])


def mean_iou(found: Tensor, labels: Tensor) -> float:
    """The mean over classes of pixels that are both, of those that are either."""
    pairs = torch.stack([labels.flatten(), found.flatten()])
    table = torch.zeros(CLASSES, CLASSES).index_put_(tuple(pairs), torch.ones(pairs.shape[1]), accumulate=True)
    either = table.sum(0) + table.sum(1) - table.diagonal()
    there = either > 0
    return float((table.diagonal()[there] / either[there]).mean())


def drawn(path: Path, image: Tensor, rows: dict[str, Tensor]) -> None:
    """Save a picture: the canvas, the truth, and what each net says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(3 * (1 + len(rows)), 3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + len(rows))
    panels[0].imshow(image[0].numpy(), cmap="gray")
    for panel, labels in zip(panels[1:], rows.values(), strict=True):
        panel.imshow(labels.numpy(), cmap="tab20", vmin=0, vmax=19, interpolation="nearest")
    for panel, name in zip(panels, ("canvas", *rows), strict=True):
        panel.set_title(name)
        panel.axis("off")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train the nets, print their mean IoU, save a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="conv,hybrid,convnn")
    parser.add_argument("--canvases", type=int, default=240, help="how many to learn from")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=24, help="channels")
    parser.add_argument("--side", type=int, default=16, help="of a canvas that is learned from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("segments.png"))
    given = parser.parse_args(arguments)
    seen = (given.side, given.side)
    images, labels = canvases(given.canvases, seen, 2, slice(0, 1400), given.seed)
    larger = (given.side + 8, given.side + 20)
    tests = {size: canvases(48, size, 6, slice(1400, None), given.seed + 1) for size in (seen, larger)}
    print(f"{len(images)} canvases of {seen} with digits on them; tested on others of {seen} and of {larger}")
    found, rows = {}, {"truth": tests[larger][1][0]}
    for layer in given.layers.split(","):
        torch.manual_seed(given.seed)
        model, start = net(layer, given.width), time.perf_counter()
        learned(model, images, labels, given.epochs)
        taken = time.perf_counter() - start
        scores = [mean_iou(segmented(model, test), truth) for test, truth in tests.values()]
        parameters = sum(parameter.numel() for parameter in model.parameters())
        said = ", ".join(f"{100 * score:.1f} % on {size}" for score, size in zip(scores, tests, strict=True))
        print(f"{layer:8} mean IoU {said}; {parameters:,} parameters, {taken:.1f} s")
        found[layer], rows[layer] = scores[1], segmented(model, tests[larger][0][:1])[0]
    drawn(given.picture, tests[larger][0][0], rows)
    print(f"{given.picture}: canvas, truth, and what each net says")
    return found


if __name__ == "__main__":
    main()
