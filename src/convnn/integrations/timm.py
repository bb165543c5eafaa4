"""The models in timm's registry: after ``import convnn.integrations.timm``, ``timm.create_model`` knows them.

:func:`convnn.convert` knows the layers of timm's own models then, see :mod:`convnn.integrations.timm_layers`.

Vision transformers are timm's own with ConvNN attention in them, so that everything timm does with one works. VGG and
ResNet are the library's, with a hybrid layer where a 3x3 convolution stood.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    import timm
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
    from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
    from timm.models.vision_transformer import VisionTransformer
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("convnn.integrations.timm needs timm: pip install timm") from missing

from torch import nn

from convnn import models
from convnn.integrations import timm_layers
from convnn.layers import ConvNNAttention
from convnn.models import resnet, vgg, vit

__all__ = ["NAMES", "timm_layers"]

# What ConvNNAttention takes beside what timm gives to an attention of its own.
OPTIONS = (
    "k", "kernel", "shared_kernel", "kernel_init", "similarity", "weighting", "candidates", "self_score", "subset",
    "position", "mask", "kernel_drop", "backend",
)  # fmt: skip


def _vit_name(name: str) -> str:
    patch = vit.CONFIGURATIONS[name][-1]
    return f"convnn_{name}_patch{patch}_224"


NAMES: dict[str, str] = {
    **{f"convnn_{name}": name for name in (*vgg.CONFIGURATIONS, *resnet.CONFIGURATIONS)},
    **{_vit_name(name): name for name in vit.CONFIGURATIONS},
}


def _configuration(name: str) -> dict[str, Any]:
    """What timm wants to know of a model without weights."""
    shared = {"url": "", "num_classes": 1000, "input_size": (3, 224, 224), "interpolation": "bicubic"}
    if name in vit.CONFIGURATIONS:
        places = {"first_conv": "patch_embed.proj", "classifier": "head"}
        statistics = {"mean": IMAGENET_INCEPTION_MEAN, "std": IMAGENET_INCEPTION_STD}
        return {**shared, "pool_size": None, "crop_pct": 0.9, "fixed_input_size": True, **statistics, **places}
    statistics = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    places = {"first_conv": "conv1", "classifier": "fc"}
    if name in vgg.CONFIGURATIONS:
        places = {"first_conv": "features.0", "classifier": "classifier.6"}
    return {**shared, "pool_size": (7, 7), "crop_pct": 0.875, **statistics, **places}


default_cfgs = generate_default_cfgs({f"{full}.untrained": _configuration(name) for full, name in NAMES.items()})


def _transformer(full: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    dim, depth, heads, patch = vit.CONFIGURATIONS[NAMES[full]]
    chosen = {name: options.pop(name) for name in OPTIONS if name in options}
    layer = ConvNNAttention.using(**{"k": 9, **chosen})
    sizes = {"patch_size": patch, "embed_dim": dim, "depth": depth, "num_heads": heads}
    indices = options.pop("out_indices", 3)
    features = {"out_indices": indices, "feature_cls": "getter"}
    return build_model_with_cfg(
        VisionTransformer, full, pretrained, feature_cfg=features, **{**sizes, "attn_layer": layer, **options}
    )


class _Convolutional(nn.Module):
    """Makes one of the library's models, with what timm reads off it."""

    def __new__(cls, name: str, **options: Any) -> Any:
        in_channels = options.pop("in_chans", 3)
        given = {"layer": "hybrid", **_translated(name, options)}
        model: Any = models.create(name, in_channels=in_channels, **given)
        model.feature_info = _stages(name, model)
        return model


def _translated(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """timm's ordinary arguments as the models' own; what they cannot do is refused by name."""
    left = dict(options)
    rate = left.pop("drop_rate", 0.0)
    if rate and name in vgg.CONFIGURATIONS:
        left["dropout"] = rate
        rate = 0.0
    asked = {"drop_rate": rate, "drop_path_rate": left.pop("drop_path_rate", 0.0)}
    asked |= {"global_pool": left.pop("global_pool", "avg"), "output_stride": left.pop("output_stride", 32)}
    left.pop("img_size", None)  # any size will do
    plain: dict[str, Any] = {"drop_rate": 0.0, "drop_path_rate": 0.0, "global_pool": "avg", "output_stride": 32}
    for argument, value in asked.items():
        if value is not None and value != plain[argument]:
            raise ValueError(f"convnn_{name} takes {argument}={plain[argument]!r} only, got {value!r}")
    return left


def _stages(name: str, model: Any) -> list[dict[str, Any]]:
    """Where features of each resolution leave the model."""
    if name in resnet.CONFIGURATIONS:
        last = [list(getattr(model, f"layer{stage}"))[-1] for stage in range(1, 5)]
        widths = [(getattr(block, "bn3", None) or block.bn2).num_features for block in last]
        first = 1 if isinstance(model.maxpool, nn.Identity) else 4
        stem = {"num_chs": 64, "reduction": max(1, first // 2), "module": "relu"}
        return [stem] + [
            {"num_chs": width, "reduction": first * 2**stage, "module": f"layer{stage + 1}"}
            for stage, width in enumerate(widths)
        ]
    stages: list[dict[str, Any]] = []
    width = 0
    for number, module in enumerate(model.features):
        width = getattr(module, "out_channels", width)
        if isinstance(module, nn.MaxPool2d):
            stages.append({"num_chs": width, "reduction": 2 ** (len(stages) + 1), "module": f"features.{number}"})
    return stages


def _convolutional(full: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    features = {"feature_cls": "hook", "flatten_sequential": False}
    return build_model_with_cfg(
        _Convolutional, full, pretrained, feature_cfg=features, **{"name": NAMES[full], **options}
    )


def _register(full: str) -> None:
    """Put an entry point of this name into timm's registry."""
    make = _transformer if NAMES[full] in vit.CONFIGURATIONS else _convolutional

    def entry(pretrained: bool = False, **options: Any) -> nn.Module:
        return make(full, pretrained, options)

    entry.__name__ = full
    entry.__module__ = __name__
    setattr(sys.modules[__name__], full, register_model(entry))


for _full in NAMES:
    _register(_full)

__all__ += list(NAMES)
VERSION = timm.__version__
