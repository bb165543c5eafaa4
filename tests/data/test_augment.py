"""What a recipe asks for is what is done to the images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.auto_augment import AugMixAugment, AutoAugment, RandAugment
from timm.data.transforms import MaybePILToTensor, RandomResizedCropAndInterpolation
from torchvision import transforms  # type: ignore[import-untyped]

from convnn_lab.data import augment
from convnn_lab.recipes import RECIPES, Recipe

IMAGENET = RECIPES["resnet50-imagenet"]
MEAN = (0.485, 0.456, 0.406)
PLAIN = Recipe(image_size=16)


def picture(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_training_on_imagenet_applies_all_that_its_recipe_lists() -> None:
    crop, flip, policy, jitter, last = augment.train_transform(IMAGENET, MEAN).transforms
    assert isinstance(crop, RandomResizedCropAndInterpolation)
    assert (crop.size, crop.scale) == ((224, 224), (0.08, 1.0))
    assert crop.ratio == pytest.approx((3 / 4, 4 / 3))
    assert crop.interpolation is transforms.InterpolationMode.BICUBIC
    assert isinstance(flip, transforms.RandomHorizontalFlip)
    assert flip.p == 0.5
    assert isinstance(policy, RandAugment)
    assert policy.num_layers == 2
    assert len(policy.ops) == 15
    assert "PosterizeIncreasing" in {op.name for op in policy.ops}
    for op in policy.ops:
        assert (op.magnitude, op.magnitude_std, op.prob) == (9, 0.5, 0.5)
        assert op.kwargs == {"fillcolor": (124, 116, 104), "resample": Image.Resampling.BICUBIC}
    assert isinstance(jitter, transforms.ColorJitter)
    for factor in (jitter.brightness, jitter.contrast, jitter.saturation):
        assert factor == pytest.approx((0.6, 1.4))
    assert jitter.hue is None
    assert isinstance(last, MaybePILToTensor)
    made = augment.train_transform(IMAGENET, MEAN)(picture(50, 70))
    assert (made.shape, made.dtype) == ((3, 224, 224), torch.uint8)


def test_without_a_random_crop_the_middle_is_taken_and_the_rest_is_done() -> None:
    middle = augment.train_transform(replace(IMAGENET, crop_scale=None), MEAN).transforms
    kinds = [type(each) for each in middle]
    asked = [transforms.RandomHorizontalFlip, RandAugment, transforms.ColorJitter, MaybePILToTensor]
    assert kinds == [transforms.Resize, transforms.CenterCrop, *asked]
    assert (middle[0].size, middle[0].interpolation, middle[1].size) == (
        256,
        transforms.InterpolationMode.BICUBIC,
        (224, 224),
    )


def test_where_nothing_is_asked_for_training_and_testing_are_the_same() -> None:
    given = picture(20, 30)
    assert torch.equal(augment.train_transform(PLAIN, MEAN)(given), augment.test_transform(PLAIN)(given))
    mirrored = augment.train_transform(replace(PLAIN, flip=1.0), MEAN)(given)
    assert torch.equal(mirrored, augment.test_transform(PLAIN)(given).flip(-1))


@pytest.mark.parametrize(("side", "share", "resized"), [(224, 0.875, 256), (224, 0.95, 236), (32, 1.0, 32)])
def test_testing_takes_the_middle_of_the_resized_image(side: int, share: float, resized: int) -> None:
    recipe = replace(IMAGENET, image_size=side, crop_share=share)
    resize, crop, last = augment.test_transform(recipe).transforms
    assert (resize.size, resize.interpolation, crop.size) == (
        resized,
        transforms.InterpolationMode.BICUBIC,
        (side, side),
    )
    assert isinstance(last, MaybePILToTensor)
    given = picture(2 * resized, 3 * resized)
    small = given.resize((resized * 3 // 2, resized), Image.Resampling.BICUBIC)
    left, top = round((small.width - side) / 2), round((resized - side) / 2)
    expected = np.asarray(small.crop((left, top, left + side, top + side)))
    assert np.array_equal(augment.test_transform(recipe)(given).permute(1, 2, 0), expected)


def test_interpolation_is_the_one_asked_for() -> None:
    recipe = replace(IMAGENET, interpolation="bilinear")
    assert augment.test_transform(recipe).transforms[0].interpolation is transforms.InterpolationMode.BILINEAR
    crop, _, policy, *_ = augment.train_transform(recipe, MEAN).transforms
    assert crop.interpolation is transforms.InterpolationMode.BILINEAR
    assert policy.ops[0].kwargs["resample"] is Image.Resampling.BILINEAR


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("rand-m5-n3-p0.4-mmax12-tweights", RandAugment),
        ("rand-m9-mstd101-t3a", RandAugment),
        ("augmix-m5-w4-d2-a0.5-b1", AugMixAugment),
        ("original-mstd0.5", AutoAugment),
        ("v0r", AutoAugment),
        ("3a", AutoAugment),
    ],
)
def test_every_policy_of_timm_can_be_named(policy: str, kind: type) -> None:
    made = augment.train_transform(replace(IMAGENET, image_size=16, augment=policy), MEAN)
    assert [type(each) for each in made.transforms[2:4]] == [kind, transforms.ColorJitter]
    assert made(picture(40, 30)).shape == (3, 16, 16)


# timm takes the first four of these and does something else.
@pytest.mark.parametrize(
    "policy", ["", "rand-mstd", "rand-m9-tunknown", "original-x", "rand-q3", "random", "v1", "rand-m1.5"]
)
def test_a_policy_that_timm_would_misread_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match=rf"--augment must be a policy .* rand-m9-mstd0.5-inc1, got '{policy}'"):
        augment.train_transform(replace(IMAGENET, augment=policy), MEAN)


@pytest.mark.parametrize("field", ["crop_scale", "crop_ratio", "crop_share"])
def test_a_share_of_nothing_is_refused(field: str) -> None:
    recipe = replace(IMAGENET, **{field: 0.0})  # type: ignore[arg-type]
    make = augment.test_transform if field == "crop_share" else lambda given: augment.train_transform(given, MEAN)
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} must be more than 0, got 0.0"):
        make(recipe)


def test_images_of_a_folder_are_brought_to_one_side() -> None:
    assert augment.test_transform(replace(PLAIN, image_size=None))(picture(20, 30)).shape == (3, 224, 224)
    assert (augment.side(PLAIN), augment.side(replace(PLAIN, image_size=None))) == (16, 224)


def test_erasing_is_what_the_recipe_says() -> None:
    made = augment.erasing(IMAGENET, "cpu")
    assert made is not None
    assert (made.mode, made.per_pixel, made.probability, made.device) == ("pixel", True, 0.25, "cpu")
    assert (made.min_count, made.max_count, made.num_splits) == (1, 1, 0)
    assert augment.erasing(PLAIN, "cpu") is None
    always = augment.erasing(replace(IMAGENET, erase=1.0), torch.device("cpu"))
    assert always is not None
    erased = always(torch.full((9, 3, 20, 24), 7.0)) != 7
    shares = erased.float().mean((1, 2, 3))
    assert shares.min() > 0.01
    assert shares.max() < 0.4


def test_mixing_is_what_the_recipe_says() -> None:
    made = augment.mixing(IMAGENET, 1000)
    assert made is not None
    assert (made.mixup_alpha, made.cutmix_alpha, made.mix_prob, made.switch_prob) == (0.8, 1.0, 1.0, 0.5)
    assert (made.label_smoothing, made.num_classes, made.mode, made.cutmix_minmax) == (0.1, 1000, "batch", None)
    assert augment.mixing(PLAIN, 10) is None
    for only in ({"mixup": 0.2}, {"cutmix": 0.2}):
        assert augment.mixing(replace(PLAIN, **only), 10) is not None  # type: ignore[arg-type]
    np.random.seed(0)
    images, labels = made(torch.arange(4.0)[:, None, None, None].expand(4, 3, 6, 5).clone(), torch.tensor([0, 1, 2, 3]))
    assert images.shape == (4, 3, 6, 5)
    torch.testing.assert_close(labels.sum(1), torch.ones(4))
    assert labels.min() == pytest.approx(0.1 / 1000)
    share = (labels[0, 3] - labels.min()) / 0.9  # of the last image in the first
    torch.testing.assert_close(images[0].mean(), 3 * share)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("crop_scale", 0.08),
        ("crop_ratio", 0.5),
        ("flip", 0.5),
        ("jitter", 0.4),
        ("augment", "v0"),
        ("interpolation", "bilinear"),
        ("crop_share", 0.9),
    ],
)
def test_what_only_folders_can_honour_is_refused_for_arrays(field: str, value: Any) -> None:
    recipe = replace(PLAIN, dataset="cifar10", **{field: value})
    with pytest.raises(
        ValueError, match=rf"--{field.replace('_', '-')} is for folders .* cifar10 is none; .*, got {value}"
    ):
        augment.require_arrays_fit(recipe)


def test_what_arrays_can_honour_passes() -> None:
    augment.require_arrays_fit(replace(PLAIN, erase=0.5, mixup=0.2, cutmix=0.3, smoothing=0.1))
    for name, recipe in RECIPES.items():
        if "imagenet" not in name:
            augment.require_arrays_fit(recipe)
