"""What pretrained networks still know after convnn.convert: answers before and after, on what they were tested on.

python benchmarks/pretrained.py DATA [--networks resnet20 vit ...] [--images N] [--k 8 16 32] [--search]

--search lets convolutions find their neighbours by the genuine search, which takes long: say --images too.

DATA holds models/, cifar10/, mnist/ and resnet50/ (see convnn_lab.pretrained).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

import convnn
from convnn import ConvNN2d, ConvNNAttention
from convnn_lab.pretrained import scores
from convnn_lab.pretrained.scores import NETWORKS, Images


def timed(model: nn.Module, images: Tensor) -> tuple[Tensor, float]:
    began = time.perf_counter()
    return scores.logits(model, images), time.perf_counter() - began


def said(answers: Tensor, given: Images, names: list[str] | None) -> str:
    if given.labels is not None:
        return f"{scores.right(answers, given.labels):.2%} right"
    named = names or [str(number) for number in range(answers.shape[-1])]
    return "; ".join(", ".join(named[place] for place in row.topk(5).indices) for row in answers)


def row(name: str, answers: Tensor, seconds: float, before: Tensor) -> None:
    apart, changed = (answers - before).abs().max().item(), (answers.argmax(-1) != before.argmax(-1)).sum().item()
    print(f"  {name:24} {seconds:7.1f} s   logits differ by {apart:.1e}   {changed} answers changed", flush=True)


def compare(name: str, data: Path, count: int | None, ks: list[int], search: bool) -> None:
    network, names = NETWORKS[name], scores.labels(data) if name == "resnet50" else None
    model, given = network.read(data), network.images(data, count)
    before, seconds = timed(model, given.images)
    print(f"{name}, {len(given.images)} images\n  {'as it was':24} {seconds:7.1f} s   {said(before, given, names)}")
    twin, report = convnn.convert(model)
    after, seconds = timed(twin, given.images)
    row(f"{len(report.replaced)} layers converted", after, seconds, before)
    print(f"  {'':36}{said(after, given, names)}; {len(report.left)} left, exact: {report.exact}")
    if search and any(isinstance(module, nn.Conv2d) for module in model.modules()):
        by_search = convnn.convert(model, {nn.Conv2d: ConvNN2d.using(backend="chunked")})[0]
        row("… by search", *timed(by_search, given.images), before)
    for k in ks if any(isinstance(module, Attention) for module in model.modules()) else []:
        rules: dict[Any, Any] = {Attention: ConvNNAttention.using(k=k, kernel=None)}
        nearest, seconds = timed(convnn.convert(model, rules)[0], given.images)
        row(f"the {k} nearest keys", nearest, seconds, before)
        print(f"  {'':36}{said(nearest, given, names)}")


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("data", type=Path)
    asked.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    asked.add_argument("--images", type=int, help="the first so many; all by default")
    asked.add_argument("--k", type=int, nargs="*", default=[8, 16, 32], help="attend to so many nearest keys too")
    asked.add_argument("--search", action="store_true", help="convolutions by the genuine search too")
    asked.add_argument("--threads", type=int, default=1)
    given = asked.parse_args()
    torch.set_num_threads(given.threads)
    for name in given.networks:
        compare(name, given.data, given.images, given.k, given.search)


if __name__ == "__main__":
    main()
