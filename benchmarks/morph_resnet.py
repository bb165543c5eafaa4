"""Make a trained ResNet-20 hybrid without losing a digit, then let half of its channels look for similar cells.

    python benchmarks/morph_resnet.py DATA [--device cuda] [--epochs 3] [--stages 3] [--variants share,dial,plain]

DATA holds ``models/resnet20_cifar10.safetensors`` and ``cifar10/``. Half of the channels of every 3x3 convolution of
stride 1 in the stages move to a ConvNN that compares places alone, which is that convolution. Then, with fine-tuning,
its share of features goes from 0 to 1 by a schedule (``share``), or is learned through who is chosen (``dial``);
``plain`` fine-tunes the convolutions as they are. ``--train`` and ``--test`` take fewer images, ``--output`` names a
folder for a table and a figure.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convnn
from convnn import HybridConv2d, morph
from convnn.blend import Blend
from convnn.layers.windows import Nearness
from convnn.selection import straight_through
from convnn_lab.data import load
from convnn_lab.pretrained.resnet_cifar import MEAN, STD, resnet_cifar
from convnn_lab.train.tuning import Look, accuracy, draw, tell, tune, write


def prepared(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(numbers, device=images.device)[:, None, None] for numbers in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def augmented(images: Tensor) -> Tensor:
    """Mirror every second image, and move all of them by up to four pixels."""
    down, right = torch.randint(9, (2,)).tolist()
    moved = F.pad(images, [4] * 4)[..., down : down + 32, right : right + 32]
    return torch.where(torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5, moved.flip(-1), moved)


def converted(path: Path, stages: str, kind: str) -> nn.Module:
    """The network with hybrid layers in some stages; ``kind`` is ``"plain"``, ``"share"`` or ``"dial"``."""
    model = resnet_cifar(path)
    if kind == "plain":
        return model
    options: dict[str, Any] = {"ratio": 0.5}
    if kind == "dial":
        options["blend"] = Blend(0.0, space=Nearness((3, 3), (1, 1)), learned=True)
        options["selection"] = straight_through(0.5)
    layer = HybridConv2d.using(**options)
    places = tuple(f"layer{stage}." for stage in stages.split(","))
    names = [
        name
        for name, part in model.named_modules()
        if name.startswith(places) and isinstance(part, nn.Conv2d) and part.stride == (1, 1)
    ]
    return convnn.convert(model, dict.fromkeys(names, layer), copy=False)[0]


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """SGD; a dial moves by its own rate, and is not pulled to 0."""
    dials = [p for name, p in model.named_parameters() if name.endswith(".raw")]
    others = [p for name, p in model.named_parameters() if not name.endswith(".raw")]
    groups = [{"params": others, "lr": lr, "weight_decay": 1e-4}]
    groups += [{"params": dials, "lr": 10 * lr, "weight_decay": 0.0}] if dials else []
    return torch.optim.SGD(groups, momentum=0.9)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stages", default="3")
    parser.add_argument("--variants", default="share,plain")
    parser.add_argument("--train", type=int, default=50_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--looks", type=int, default=2)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


NAMES = {"share": "share from 0 to 1", "dial": "a learned share", "plain": "convolutions"}


def main() -> None:
    given = arguments()
    path = given.data / "models" / "resnet20_cifar10.safetensors"
    held = load("cifar10", given.data / "cifar10")
    train, test = (
        (part.images[:count].to(given.device), part.labels[:count].long().to(given.device))
        for part, count in ((held.train, given.train), (held.test, given.test))
    )
    start = accuracy(converted(path, given.stages, "plain").to(given.device), *test, prepared)
    print(f"as it was trained               {100 * start:.2f} %", flush=True)
    model = converted(path, given.stages, "share").to(given.device)
    for share in (0.0, 1.0):
        morph.apply(model, share=share)
        print(f"hybrid, share {share}, not trained  {100 * accuracy(model, *test, prepared):.2f} %", flush=True)
    runs: dict[str, list[Look]] = {}
    for kind in given.variants.split(","):
        torch.manual_seed(0)
        model = converted(path, given.stages, kind).to(given.device)
        schedules = {"share": morph.line(0, 1, over=2 * given.epochs / 3)} if kind == "share" else {}
        options: Any = {"epochs": given.epochs, "batch": given.batch, "looks": given.looks}
        options |= {"prepare": prepared, "augment": augmented, "schedules": schedules}
        looks = tune(model, train, test, optimizer=optimizer_of(model, given.lr), **options)
        runs[NAMES[kind]] = tell(NAMES[kind], looks)
        for place, shares in morph.dial(model).items():
            print(f"    {place}: {', '.join(f'{share:.3f}' for share in shares)}", flush=True)
    if given.output is not None:
        draw(given.output / "morph-resnet.svg", runs, level=start, said="ResNet-20, as it was trained")
        write(given.output / "morph-resnet.csv", runs)


if __name__ == "__main__":
    main()
