"""ResNet: residual blocks of two 3x3 convolutions, or of a 3x3 between two 1x1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.models.factories import Convolution, conv, convolution_of, head, initialised, placed

Depths = Sequence[int]
CONFIGURATIONS: dict[str, tuple[str, Depths]] = {
    "resnet18": ("basic", (2, 2, 2, 2)),
    "resnet34": ("basic", (3, 4, 6, 3)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
    "resnet101": ("bottleneck", (3, 4, 23, 3)),
    "resnet152": ("bottleneck", (3, 8, 36, 3)),
}
# For images of 32 by 32 and less: three stages of 16, 32 and 64 channels, 6n + 2 layers.
SMALL: dict[str, Depths] = {f"resnet{6 * n + 2}": (n, n, n) for n in (1, 2, 3, 5, 7, 9, 18)}


class Basic(nn.Module):
    """Two 3x3 convolutions and what came in."""

    expansion: ClassVar[int] = 1
    from_factory: ClassVar[tuple[str, ...]] = ("conv1", "conv2")

    def __init__(
        self, inputs: int, width: int, stride: int, make: Convolution, strided: Convolution, bias: bool
    ) -> None:
        super().__init__()
        self.conv1 = (make if stride == 1 else strided)(inputs, width, stride=stride, bias=bias)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = make(width, width, bias=bias)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(inputs, width, stride, bias)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1, and what came in; the stride is in the 3x3."""

    expansion: ClassVar[int] = 4
    from_factory: ClassVar[tuple[str, ...]] = ("conv2",)

    def __init__(
        self, inputs: int, width: int, stride: int, make: Convolution, strided: Convolution, bias: bool
    ) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=bias)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = (make if stride == 1 else strided)(width, width, stride=stride, bias=bias)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=bias)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride, bias)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def _downsample(inputs: int, outputs: int, stride: int, bias: bool) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=bias), nn.BatchNorm2d(outputs))


# The side and the stride of the first convolution.
STEMS = {"imagenet": (7, 2), "cifar": (3, 1), "half": (3, 2)}
BLOCKS: dict[str, type[Basic] | type[Bottleneck]] = {"basic": Basic, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """A ResNet whose 3x3 convolutions may be any layer; names and shapes are torchvision's.

    Args:
        block: ``"basic"`` or ``"bottleneck"``.
        depths: how many blocks each stage has; every stage but the first halves the sides.
        width: the channels of the first stage; every other has twice those of the one before.
        layer: what stands where a 3x3 convolution of stride 1 stood: a name of :mod:`convnn.models.factories`, or a
            factory.
        strided: what stands where one of stride 2 stood; None for a convolution, as published.
        stem: ``"imagenet"``, a 7x7 of stride 2 and a pooling; ``"cifar"``, a 3x3 that keeps the size; ``"half"``, a 3x3
            of stride 2.
        bias: whether the convolutions of the backbone have a bias, the layer's too unless it says otherwise.
        options: of the layer, where it is given by name.

    Shape:
        ``(B, C, H, W)`` to ``(B, num_classes)``.
    """

    def __init__(
        self,
        block: Literal["basic", "bottleneck"],
        depths: Depths,
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        layer: str | Convolution = "conv",
        strided: str | Convolution | None = None,
        stem: Literal["imagenet", "cifar", "half"] = "imagenet",
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.one_of("block", block, tuple(BLOCKS))
        checks.one_of("stem", stem, tuple(STEMS))
        checks.whole("num_classes", num_classes, 0)
        checks.whole("in_channels", in_channels, 1)
        make = convolution_of(layer, options)
        plain = strided is None or strided == "conv"
        halve = conv if plain else convolution_of(strided, options if strided == layer else {})  # type: ignore[arg-type]
        checks.whole("width", width, 1)
        if not depths:
            raise ValueError("a ResNet needs at least one stage, got no depths")
        kind, channels, self.stages = BLOCKS[block], width, len(depths)
        with placed(device):
            size, stride = STEMS[stem]
            self.conv1 = nn.Conv2d(in_channels, width, size, stride, size // 2, bias=bias)
            self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
            self.maxpool = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
            for stage, depth in enumerate(depths):
                inner, blocks = width * 2**stage, []
                for number in range(depth):
                    step = 2 if stage and not number else 1
                    blocks.append(kind(channels, inner, step, make, halve, bias))
                    channels = inner * kind.expansion
                setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
            self.avgpool = nn.AdaptiveAvgPool2d(1)
            self.fc = head(channels, num_classes)
        self.num_classes, self.num_features, self.head_hidden_size = num_classes, channels, channels
        # What a factory made starts as it was made.
        blocks_ = [m for m in self.modules() if isinstance(m, (Basic, Bottleneck)) and not isinstance(layer, str)]
        initialised(self, [getattr(each, name) for each in blocks_ for name in each.from_factory])
        self.to(dtype=dtype)

    def forward_features(self, x: Tensor) -> Tensor:
        """The map before it is pooled for the classifier."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Classify a map of features."""
        x = self.avgpool(x).flatten(1)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:  # noqa: ARG002
        """Put a new last layer for so many classes, or none for 0."""
        self.num_classes = num_classes
        self.fc = head(self.num_features, num_classes).to(self.conv1.weight)
