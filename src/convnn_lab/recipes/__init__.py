"""Recipes: named starting points for a run, whose every field is a flag."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from convnn_lab.recipes.recipe import Recipe, from_dict

__all__ = ["RECIPES", "Recipe", "from_dict", "named"]

# As the thesis ran CIFAR: a constant rate, no augmentation, float32 to the last bit.
_CIFAR = Recipe(
    dataset="cifar10", published=True, epochs=150, batch=256, lr=1e-4, weight_decay=0.01, clip=1.0, seed=42, k=9
)  # fmt: skip
_VGG = replace(_CIFAR, model="vgg11", layer="hybrid", ratio=0.5, dropout=0.5)
_VIT = replace(
    _CIFAR, model="vit_tiny", layer="convnn", heads=1, candidates="random:32", dropout=0.1, image_size=224
)  # fmt: skip

# As the thesis ran ImageNet, on four devices of 320 images.
_IMAGENET = Recipe(
    dataset="imagenet", published=True, image_size=224, epochs=300, batch=1280, device_batch=320,
    lr=1e-3, weight_decay=0.05, schedule="cosine", warmup=20, warmup_lr=1e-7, min_lr=5e-6, clip=5.0,
    smoothing=0.1, crop_scale=0.08, flip=0.5, jitter=0.4, augment="rand-m9-mstd0.5-inc1", interpolation="bicubic",
    erase=0.25, erase_mode="pixel", mixup=0.8, cutmix=1.0, mix_probability=1.0, mix_switch=0.5, precision="half",
    k=9, save_every="10m",
)  # fmt: skip

# Characters of Shakespeare, as nanoGPT learns them: a constant number of steps there, of epochs here.
_TEXT = Recipe(
    dataset="shakespeare", model="gpt_mini", layer="convnn", k=32, context=256, dropout=0.2, epochs=80, batch=64,
    lr=1e-3, beta2=0.99, weight_decay=0.1, decay_all=False, schedule="cosine", warmup=2, min_lr=1e-4, precision="tf32",
)  # fmt: skip

RECIPES: dict[str, Recipe] = {
    "digits": Recipe(dataset="digits", epochs=10, batch=64, lr=2e-3, layer="hybrid", schedule="cosine"),
    "fashion-mnist": Recipe(
        dataset="fashion-mnist",
        stem="imagenet",
        width=32,
        epochs=5,
        batch=128,
        lr=2e-3,
        layer="hybrid",
        schedule="cosine",
    ),
    "vgg11-cifar10": _VGG,
    "vgg11-cifar100": replace(_VGG, dataset="cifar100"),
    "vgg11-fashion-mnist": replace(_VGG, dataset="fashion-mnist", image_size=32),
    "vit-tiny-cifar10": _VIT,
    "vit-tiny-cifar100": replace(_VIT, dataset="cifar100"),
    "shakespeare": _TEXT,
    "shakespeare-tiny": replace(
        _TEXT, model="gpt_tiny", k=8, context=64, dropout=0.0, epochs=1, batch=16, warmup=0.1, precision="float32"
    ),
    "resnet50-imagenet": replace(_IMAGENET, model="resnet50", layer="hybrid", ratio=0.5),
    "vit-base-imagenet": replace(_IMAGENET, model="vit_base", layer="convnn", heads=12, dropout=0.1),
}


def named(name: str) -> Recipe:
    """A recipe by name."""
    if name not in RECIPES:
        close = get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"unknown recipe {name!r}; {hint}there are {', '.join(RECIPES)}")
    return RECIPES[name]
