"""VGG: stacks of 3x3 convolutions between poolings, then three fully connected layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from convnn import checks
from convnn.models.factories import Convolution, convolution_of, head, initialised, placed

# Channels of the convolutions between poolings; "1" marks one of 1x1.
CONFIGURATIONS: dict[str, Sequence[Sequence[int | tuple[int, str]]]] = {
    "vgg11": ((64,), (128,), (256, 256), (512, 512), (512, 512)),  # A
    "vgg13": ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512)),  # B
    "vgg16c": (  # C
        (64, 64),
        (128, 128),
        (256, 256, (256, "1")),
        (512, 512, (512, "1")),
        (512, 512, (512, "1")),
    ),
    "vgg16": ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3),  # D
    "vgg19": ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4),  # E
}


class Pooled(nn.AdaptiveAvgPool2d):
    """The 7x7 the classifier sees: means over a map, or its only cell 49 times, which needs no mean."""

    def __init__(self) -> None:
        super().__init__(7)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x.expand(*x.shape[:-2], 7, 7) if x.shape[-2:] == (1, 1) else super().forward(x)


class VGG(nn.Module):
    """A VGG whose 3x3 convolutions may be any layer; names and shapes are torchvision's.

    Args:
        blocks: the channels of the convolutions between two poolings; ``(channels, "1")`` is a 1x1 convolution.
        layer: what stands where a 3x3 convolution stood: a name of :mod:`convnn.models.factories` or a factory.
        batch_norm: whether a BatchNorm follows every convolution.
        dropout: of the classifier.
        init: how it starts: as torchvision's do, by the spread of outputs, or as torch's layers do by themselves.
            Layers of a factory start as they were made.
        options: of the layer, where it is given by name.

    Shape:
        ``(B, C, H, W)`` with sides of at least 32 to ``(B, num_classes)``.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[int | tuple[int, str]]],
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        layer: str | Convolution = "conv",
        batch_norm: bool = False,
        dropout: float = 0.5,
        init: Literal["torchvision", "torch"] = "torchvision",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.whole("num_classes", num_classes, 0)
        checks.one_of("init", init, ("torchvision", "torch"))
        checks.whole("in_channels", in_channels, 1)
        with placed(device):
            make, channels = convolution_of(layer, options), in_channels
            layers: list[nn.Module] = []
            made: list[nn.Module] = []
            for block in blocks:
                for width in block:
                    outputs, pointwise = (width, False) if isinstance(width, int) else (width[0], True)
                    layers.append(nn.Conv2d(channels, outputs, 1) if pointwise else make(channels, outputs))
                    made += [] if pointwise else [layers[-1]]
                    layers += [nn.BatchNorm2d(outputs)] if batch_norm else []
                    layers.append(nn.ReLU(inplace=True))
                    channels = outputs
                layers.append(nn.MaxPool2d(2, 2))
            self.features = nn.Sequential(*layers)
            self.avgpool = Pooled()
            hidden = [nn.Linear(49 * channels, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)]
            hidden += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)]
            self.classifier = nn.Sequential(*hidden, head(4096, num_classes))
        self.num_classes, self.num_features, self.head_hidden_size = num_classes, channels, 4096
        if init == "torchvision":
            initialised(self.features, () if isinstance(layer, str) else made)
            for module in self.classifier:
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.01)
                    nn.init.zeros_(module.bias)
        self.to(dtype=dtype)

    def forward_features(self, x: Tensor) -> Tensor:
        """The map before it is pooled for the classifier."""
        if min(x.shape[-2:]) < 32:
            raise ValueError(f"five poolings need an image of at least 32 by 32, got {tuple(x.shape)}")
        return self.features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Classify a map of features."""
        x = self.avgpool(x).flatten(1)
        return (self.classifier[:-1] if pre_logits else self.classifier)(x)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.classifier[-1]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:  # noqa: ARG002
        """Put a new last layer for so many classes, or none for 0."""
        weight = next(self.classifier.parameters())
        self.num_classes = num_classes
        self.classifier[-1] = head(4096, num_classes).to(weight)
