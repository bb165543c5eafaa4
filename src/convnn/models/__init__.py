"""VGG, ResNet, ViT and GPT, each taking the layer that stands where a 3x3 convolution or an attention stood."""

from __future__ import annotations

from typing import Any

from torch import nn

from convnn.models import gpt, resnet, vgg, vit
from convnn.models.gpt import GPT
from convnn.models.resnet import ResNet
from convnn.models.vgg import VGG
from convnn.models.vit import ViT

__all__ = ["GPT", "VGG", "ResNet", "ViT", "create", "names"]


def names() -> list[str]:
    """The models there are."""
    return [*vgg.CONFIGURATIONS, *resnet.CONFIGURATIONS, *resnet.SMALL, *vit.CONFIGURATIONS, *gpt.CONFIGURATIONS]


def create(name: str, **options: Any) -> nn.Module:
    """Make a model by name.

    Args:
        options: of :class:`VGG`, :class:`ResNet`, :class:`ViT` or :class:`GPT`, and of the layer that is named.

    Example:
        >>> model = create("resnet18", layer="hybrid", ratio=0.25, num_classes=10, stem="cifar")
        >>> model(torch.randn(1, 3, 32, 32)).shape
        torch.Size([1, 10])
        >>> create("vit_tiny", layer="convnn", k=16, image_size=64)(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 1000])
        >>> create("gpt_tiny", layer="convnn", k=16, vocabulary=65)(torch.randint(65, (1, 20))).shape
        torch.Size([1, 20, 65])
    """
    if name in vgg.CONFIGURATIONS:
        return VGG(vgg.CONFIGURATIONS[name], **options)
    if name in resnet.CONFIGURATIONS:
        block, depths = resnet.CONFIGURATIONS[name]
        return ResNet(block, depths, **options)  # type: ignore[arg-type]
    if name in resnet.SMALL:
        return ResNet("basic", resnet.SMALL[name], **{"width": 16, "stem": "cifar", **options})
    if name in vit.CONFIGURATIONS:
        dim, depth, heads, patch = vit.CONFIGURATIONS[name]
        given = {"heads": heads, "patch": patch, **options}
        return ViT(dim, depth, given.pop("heads"), given.pop("patch"), **given)
    if name in gpt.CONFIGURATIONS:
        dim, depth, heads = gpt.CONFIGURATIONS[name]
        given = {"heads": heads, **options}
        return GPT(dim, depth, given.pop("heads"), **given)
    raise ValueError(f"unknown model {name!r}; known are {', '.join(names())}")
