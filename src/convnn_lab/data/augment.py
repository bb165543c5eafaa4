"""What is done to the images of a recipe, by timm's own parts.

timm passes over what it does not know without a word: a part of a policy without a number, a set of operations by an
unknown name, colour jitter beside a policy. Here all that a recipe asks for is applied, or refused.
"""

from __future__ import annotations

import re
from dataclasses import fields

import torch
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import MaybePILToTensor, str_to_interp_mode
from timm.data.transforms_factory import transforms_imagenet_train
from torchvision.transforms import CenterCrop, Compose, Resize  # type: ignore[import-untyped]

from convnn_lab.recipes import Recipe

FOLDERS_ONLY = ("crop_scale", "crop_ratio", "flip", "jitter", "augment", "interpolation", "crop_share")

_NUMBER = r"\d+(\.\d+)?"
_POLICY = re.compile(
    rf"rand(-(m\d+|n\d+|p{_NUMBER}|mstd{_NUMBER}|mmax\d+|inc[01]|tweights|t3aw?))*"
    rf"|augmix(-(m\d+|w\d+|d\d+|a{_NUMBER}|b[01]|mstd{_NUMBER}))*"
    rf"|(original|originalr|v0|v0r|3a)(-mstd{_NUMBER})?"
)


def side(recipe: Recipe) -> int:
    """The side images of a folder, which have sizes of their own, are brought to: 224 unless told."""
    return 224 if recipe.image_size is None else recipe.image_size


def train_transform(recipe: Recipe, mean: tuple[float, ...]) -> Compose:
    """Random crop, mirror, policy and jitter, each where it is asked for, to bytes.

    Args:
        mean: of each channel, from 0 to 1; fills what a rotation uncovers.
    """
    smallest = 1.0 if recipe.crop_scale is None else _positive(recipe, "crop_scale")
    narrowest = _positive(recipe, "crop_ratio")
    if recipe.augment is not None and not _POLICY.fullmatch(recipe.augment):
        required = "--augment must be a policy as timm names it, such as rand-m9-mstd0.5-inc1"
        raise ValueError(f"{required}, got {recipe.augment!r}")
    made = transforms_imagenet_train(
        side(recipe),
        scale=(smallest, 1.0),
        ratio=(narrowest, 1 / narrowest),
        hflip=recipe.flip,
        color_jitter=recipe.jitter,
        force_color_jitter=True,
        auto_augment=recipe.augment,
        interpolation=recipe.interpolation,
        mean=mean,
        use_prefetcher=True,
    )
    if recipe.crop_scale is None:
        return Compose([*_middle(recipe), *made.transforms[1:]])
    return made


def test_transform(recipe: Recipe) -> Compose:
    """The middle of an image, to bytes."""
    return Compose([*_middle(recipe), MaybePILToTensor()])


def erasing(recipe: Recipe, device: torch.device | str) -> RandomErasing | None:
    """What erases a part of normalised images, in place, or None."""
    if recipe.erase == 0:
        return None
    return RandomErasing(recipe.erase, mode=recipe.erase_mode, max_count=1, device=device)


def mixing(recipe: Recipe, classes: int) -> Mixup | None:
    """What mixes a batch of even size with itself, and makes shares of classes of its labels, or None."""
    if recipe.mixup == 0 and recipe.cutmix == 0:
        return None
    return Mixup(
        recipe.mixup,
        recipe.cutmix,
        prob=recipe.mix_probability,
        switch_prob=recipe.mix_switch,
        mode="batch",
        label_smoothing=recipe.smoothing,
        num_classes=classes,
    )


def require_arrays_fit(recipe: Recipe) -> None:
    """Refuse what is done to the images of folders only."""
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in FOLDERS_ONLY and value != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            raise ValueError(
                f"{flag} is for folders of images, and {recipe.dataset} is none; leave it out, got {value}"
            )


def _middle(recipe: Recipe) -> list[object]:
    whole = round(side(recipe) / _positive(recipe, "crop_share"))
    return [Resize(whole, interpolation=str_to_interp_mode(recipe.interpolation)), CenterCrop(side(recipe))]


def _positive(recipe: Recipe, name: str) -> float:
    value: float = getattr(recipe, name)
    if value <= 0:
        raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {value}")
    return value
