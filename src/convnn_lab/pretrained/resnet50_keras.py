"""ResNet-50 for ImageNet as Keras published it first: model.json and raw float32 shards.

It is the first version of the network: a stage's first 1x1 convolution takes the stride, and convolutions have biases.
Images are 224 by 224, see :func:`prepared`.
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convnn_lab.pretrained.files import filled

DEPTHS = (3, 4, 6, 3)
# Of blue, green and red: these networks count the channels that way round.
MEAN = (103.939, 116.779, 123.68)
NORM = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut; the first of them takes the stride."""

    def __init__(self, inputs: int, width: int, stride: int, epsilon: float, first: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, stride), nn.BatchNorm2d(width, epsilon)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width, epsilon)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1), nn.BatchNorm2d(4 * width, epsilon)
        self.downsample: nn.Module = nn.Identity()
        if first:
            projection = nn.Conv2d(inputs, 4 * width, 1, stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(4 * width, epsilon))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    """Four stages of bottlenecks; names are torchvision's.

    Shape:
        ``(B, 3, H, W)`` to ``(B, classes)``, before the softmax.
    """

    def __init__(self, epsilon: float, classes: int = 1000, width: int = 64, depths: tuple[int, ...] = DEPTHS) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width, epsilon)
        channels = width
        for stage, depth in enumerate(depths):
            inner, blocks = width * 2**stage, []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(Bottleneck(channels, inner, stride, epsilon, first=not number))
                channels = 4 * inner
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.stages, self.fc = len(depths), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        # Keras pads with 0 before it pools; after a ReLU nothing is below that, so torch's own padding is the same.
        y = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, self.stages + 1):
            y = getattr(self, f"layer{stage}")(y)
        return self.fc(y.mean((-2, -1)))


def renamed(name: str) -> str:
    """What a weight of Keras's network is called here.

    Example:
        >>> renamed("res3b_branch2a/kernel"), renamed("bn3a_branch1/moving_mean")
        ('layer2.1.conv1.weight', 'layer2.0.downsample.1.running_mean')
    """
    layer, _, kind = name.partition("/")
    ours = NORM.get(kind, {"kernel": "weight"}.get(kind, kind))
    stem = {"conv1": "conv1", "bn_conv1": "bn1", "fc1000": "fc"}
    if layer in stem:
        return f"{stem[layer]}.{ours}"
    found = re.fullmatch(r"(res|bn)([2-5])([a-z])_branch(1|2[abc])", layer)
    if found is None:
        raise ValueError(f"{name!r} is no weight of ResNet-50: a name is like res3b_branch2a/kernel")
    what, stage, block, branch = found.groups()
    norm = what == "bn"
    kind_of = "bn" if norm else "conv"
    place = f"downsample.{int(norm)}" if branch == "1" else f"{kind_of}{'abc'.index(branch[1]) + 1}"
    return f"layer{int(stage) - 1}.{ord(block) - ord('a')}.{place}.{ours}"


def turned(kind: str, array: Tensor) -> Tensor:
    """A kernel as torch has it: (H, W, in, out) and (in, out) turned round."""
    if kind != "kernel":
        return array
    return (array.permute(3, 2, 0, 1) if array.ndim == 4 else array.mT).contiguous()


def weights(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a model.json under the names they have here."""
    state = {}
    for group in _described(folder)["weightsManifest"]:
        content = b"".join((folder / shard).read_bytes() for shard in group["paths"])
        needed = sum(4 * prod(weight["shape"]) for weight in group["weights"])
        if len(content) != needed:
            raise ValueError(f"the shards in {folder} must have {needed} bytes together, got {len(content)}")
        start = 0
        for weight in group["weights"]:
            if weight["dtype"] != "float32":
                raise ValueError(f"weights must be float32, got {weight['name']} of {weight['dtype']}")
            count = prod(weight["shape"])
            array = np.frombuffer(content, "<f4", count, start).reshape(weight["shape"]).copy()
            start += 4 * count
            state[renamed(weight["name"])] = turned(weight["name"].partition("/")[2], torch.from_numpy(array))
    return state


def _described(folder: Path) -> dict[str, Any]:
    path = folder / "model.json"
    if not path.is_file():
        raise ValueError(f"there must be a model.json and its shards in {folder}, and there is none")
    return json.loads(path.read_text())


def resnet50(folder: Path) -> nn.Module:
    """Read the network out of the folder of its model.json, which also says the epsilon of its norms."""
    layers = _described(folder)["modelTopology"]["model_config"]["config"]["layers"]
    epsilons = {layer["config"]["epsilon"] for layer in layers if layer["class_name"] == "BatchNormalization"}
    if len(epsilons) != 1:
        raise ValueError(f"all norms must have one epsilon, got {sorted(epsilons)}")
    state = weights(folder)
    classes, width = state["fc.bias"].shape[0], state["conv1.bias"].shape[0]
    places = {name.rpartition(".conv1")[0] for name in state if name.startswith("layer")} - {""}
    depths = tuple(sum(place.startswith(f"layer{stage}.") for place in places) for stage in range(1, 5))
    return filled(ResNet50(epsilons.pop(), classes, width, tuple(depth for depth in depths if depth)), state)


def prepared(pixels: np.ndarray) -> Tensor:
    """A photograph ``(H, W, 3)`` of bytes as the network takes it: its middle square at 224 by 224, less the mean."""
    side = min(pixels.shape[:2])
    top, left = ((length - side) // 2 for length in pixels.shape[:2])
    square = torch.from_numpy(pixels[top : top + side, left : left + side].copy()).permute(2, 0, 1)[None].float()
    small = F.interpolate(square, (224, 224), mode="bilinear", antialias=True, align_corners=False)
    return small.flip(1) - torch.tensor(MEAN)[:, None, None]
