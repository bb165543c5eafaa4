"""Folders of images, written here in small; and what is read from them, by whom and in which order."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from convnn_lab.data import augment, folder, loader
from convnn_lab.data.folder import Folder
from convnn_lab.data.loader import Images
from convnn_lab.recipes import RECIPES, Recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # where there is one core
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

WNIDS = [f"n{number:08}" for number in range(1000)]
SMALL = replace(RECIPES["resnet50-imagenet"], image_size=16, batch=8, device_batch=None, workers=0)


def picture(path: Path, seed: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (30, 26, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def small(tmp_path: Path) -> Folder:
    """27 images to learn from, in 3 classes, and 11 to test on."""
    for number in range(27):
        picture(tmp_path / "train" / "abc"[number % 3] / f"{number:02}.{'png' if number % 2 else 'JPEG'}", number)
    for number in range(11):
        picture(tmp_path / "val" / "abc"[number % 3] / f"{number:02}.jpg", 100 + number)
    return folder.folder(tmp_path)


def empty(place: Path, *names: str) -> None:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()


def found(part: folder.Part) -> list[tuple[str, int]]:
    paths = [part.path(number).relative_to(part.place).as_posix() for number in range(len(part))]
    return list(zip(paths, part.labels.tolist(), strict=True))


def test_classes_are_folders_by_name_and_images_are_known_by_their_suffix(tmp_path: Path) -> None:
    empty(
        tmp_path / "train", "b/2.PNG", "b/1.jpeg", "a/deep/3.webp", "a/notes.txt", "a/._3.jpg", ".hidden/4.jpg", "5.jpg"
    )
    empty(tmp_path / "test", "a/6.bmp", "b/ü 7.jpg", "b/.cache/8.jpg")
    data = folder.folder(tmp_path)
    assert (data.name, data.num_classes, data.classes) == ("folder", 2, ("a", "b"))
    assert found(data.train) == [("a/deep/3.webp", 0), ("b/1.jpeg", 1), ("b/2.PNG", 1)]
    assert found(data.test) == [("a/6.bmp", 0), ("b/ü 7.jpg", 1)]
    assert (data.mean, data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    empty(tmp_path / "validation", "a/9.jpg", "b/9.jpg")
    assert folder.folder(tmp_path).test.place.name == "validation"
    empty(tmp_path / "val", "a/9.jpg", "b/9.jpg")
    assert folder.folder(tmp_path).test.place.name == "val"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"looked for train/ and val/, validation/ or test/ in .*; put images into train/<class>/"),
        (["train/a/1.jpg"], r"looked for train/ and val/"),
        (["val/a/1.jpg"], r"looked for train/ and val/"),
        (["train/1.jpg", "val/1.jpg"], r"train must have a folder for each class, got none; put images"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg"], r"must have the same class folders; only .*train has b"),
        (
            ["train/a/1.jpg", *(f"val/{name}/1.jpg" for name in "abcdef")],
            r"must have the same class folders; only .*val has b, c, d and 2 more",
        ),
        (["train/a/1.jpg", "train/b/1.txt", "val/a/1.jpg", "val/b/1.jpg"], r"train.b must have an image, .* got none"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "val/b/1"], r"val.b must have an image, one of .jpg .*"),
    ],
)
def test_a_folder_that_is_none_says_what_it_lacks(names: list[str], message: str, tmp_path: Path) -> None:
    empty(tmp_path, *names)
    with pytest.raises(ValueError, match=message):
        folder.folder(tmp_path)


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder: say where its images are with --data-dir; put images into"):
        folder.folder(None)
    with pytest.raises(ValueError, match="imagenet: say where its images are with --data-dir; get ILSVRC 2012 from"):
        folder.imagenet(None)
    with pytest.raises(ValueError, match=r"looked for train/ and val/ in .*nowhere, .*CLS-LOC, .*; get ILSVRC 2012"):
        folder.imagenet(tmp_path / "nowhere")
    empty(tmp_path, "train/n01440764/1.JPEG", "val/n01440764/1.JPEG")
    with pytest.raises(ValueError, match=r"train must have 1000 class folders, got 1; get ILSVRC 2012"):
        folder.imagenet(tmp_path)


def test_a_folder_that_cannot_be_read_is_told(small: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def locked(path: str) -> Any:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(ValueError, match=r"train.b must be a folder that can be read: Permission denied"):
        folder.folder(small.train.place.parent)


def write_imagenet(place: Path, *, flat: bool) -> None:
    for name in WNIDS:
        empty(place / "train", f"{name}/{name}_1.JPEG")
    if flat:
        empty(place / "val", *(f"ILSVRC2012_val_{number:08}.JPEG" for number in range(1, 4)))
    else:
        for name in WNIDS:
            empty(place / "val", f"{name}/ILSVRC2012_val_{name[1:]}.JPEG")


LISTED = "ImageId,PredictionString\n" + "".join(
    f"ILSVRC2012_val_{number:08},{wnid} 85 1 499 272 {wnid} 1 2 3 4 \n"
    for number, wnid in ((3, WNIDS[2]), (1, WNIDS[999]), (2, WNIDS[7]))
)


def test_imagenet_is_found_as_kaggle_has_it_and_with_class_folders(tmp_path: Path) -> None:
    cls_loc = tmp_path / "ILSVRC/Data/CLS-LOC"
    write_imagenet(cls_loc, flat=True)
    with pytest.raises(ValueError, match=r"looked for the labels of .*val in .*LOC_val_solution.csv, .*; get ILSVRC"):
        folder.imagenet(tmp_path)

    notes = tmp_path / "ILSVRC/Annotations/CLS-LOC/val"
    notes.mkdir(parents=True)
    text = "<annotation><size><width>5</width></size><object>\n\t<name>{}</name></object></annotation>"
    for number, wnid in ((1, WNIDS[4]), (2, WNIDS[5])):
        (notes / f"ILSVRC2012_val_{number:08}.xml").write_text(text.format(wnid))
    with pytest.raises(ValueError, match=r"val must name one of the 1000 classes for ILSVRC2012_val_00000003.JPEG"):
        folder.imagenet(tmp_path)
    (notes / "ILSVRC2012_val_00000003.xml").write_text(text.format(WNIDS[6]))
    for place in (tmp_path, tmp_path / "ILSVRC"):
        assert folder.imagenet(place).test.labels.tolist() == [4, 5, 6]

    solution = tmp_path / "LOC_val_solution.csv"
    solution.write_text(LISTED)
    for place in (tmp_path, tmp_path / "ILSVRC"):
        data = folder.imagenet(place)
        assert (data.name, data.num_classes, data.classes) == ("imagenet", 1000, tuple(WNIDS))
        assert data.test.labels.tolist() == [999, 7, 2]
        assert data.test.path(1) == place / cls_loc.relative_to(tmp_path if place == tmp_path else place) / (
            "val/ILSVRC2012_val_00000002.JPEG"
        )
    solution.write_text(LISTED.replace(WNIDS[7], "n99999999"))
    with pytest.raises(ValueError, match=r"solution.csv must name one of the 1000 classes for ILSVRC2012_val_00000002"):
        folder.imagenet(tmp_path)

    for path in (cls_loc / "val").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"val must have images or class folders, got neither"):
        folder.imagenet(tmp_path)
    for name in WNIDS:
        empty(cls_loc / "val", f"{name}/1.JPEG")
    for place in (tmp_path, cls_loc):
        data = folder.imagenet(place)
        assert data.train.labels.tolist() == data.test.labels.tolist() == list(range(1000))
        assert data.train.path(7) == cls_loc / "train" / WNIDS[7] / f"{WNIDS[7]}_1.JPEG"


def whole(recipe: Recipe, data: Folder, **options: Any) -> list[tuple[Tensor, Tensor]]:
    given = {"epoch": 1, "start": 0, "rank": 0, "world": 1, "per_device": recipe.batch, **options}
    return list(loader.train_loader(data, recipe, **given))


def same(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) for one, other in pairs)


def test_a_resumed_epoch_is_the_tail_of_a_whole_one_whoever_reads(small: Folder) -> None:
    batches = whole(SMALL, small)
    assert len(batches) == 3
    for images, labels in batches:
        assert (images.shape, images.dtype, labels.dtype) == ((8, 3, 16, 16), torch.uint8, torch.int64)
        assert images.is_contiguous()
    two = replace(SMALL, workers=2)
    read = whole(two, small)
    assert same(read, batches)
    assert [images.stride() for images, _ in read] == [images.stride() for images, _ in batches]
    assert same(whole(SMALL, small, start=1), batches[1:])
    assert same(whole(two, small, start=2), batches[2:])
    assert whole(SMALL, small, start=3) == []
    assert not same(whole(SMALL, small, epoch=2), batches)
    assert not same(whole(replace(SMALL, seed=1), small), batches)
    with pytest.raises(ValueError, match="start must be from 0 to the 3 batches of an epoch, got 4"):
        whole(SMALL, small, start=4)


def test_ranks_share_what_one_device_sees(small: Folder) -> None:
    batches = whole(SMALL, small)
    ranks = [whole(SMALL, small, rank=rank, world=2, per_device=4) for rank in range(2)]
    for (images, labels), *shares in zip(batches, *ranks, strict=True):
        for rank, share in enumerate(shares):
            assert torch.equal(share[0], images[rank::2])
            assert torch.equal(share[1], labels[rank::2])


@pytest.mark.parametrize(("world", "per_device", "taken"), [(1, 2, 26), (2, 4, 24), (3, 9, 27)])
def test_an_epoch_takes_every_image_once_but_for_an_incomplete_batch(
    world: int, per_device: int, taken: int, small: Folder
) -> None:
    given: dict[str, int] = {"epoch": 3, "start": 0, "world": world, "per_device": per_device}
    loaders = [loader.train_loader(small, SMALL, rank=rank, **given) for rank in range(world)]
    pairs = [pair for each in loaders for batch in each.batch_sampler for pair in batch]  # type: ignore[union-attr]
    assert {len(each) for each in loaders} == {taken // (world * per_device)}
    assert {epoch for epoch, _ in pairs} == {3}
    assert sorted(number for _, number in pairs) == sorted(loader.order(27, SMALL.seed, 3)[:taken].tolist())


def test_an_order_is_decided_by_seed_and_epoch() -> None:
    assert sorted(loader.order(27, 0, 0).tolist()) == list(range(27))
    assert torch.equal(loader.order(27, 0, 1), loader.order(27, 0, 1))
    orders = {tuple(loader.order(27, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_batch_larger_than_the_set_is_refused(small: Folder) -> None:
    with pytest.raises(ValueError, match="--batch must be small enough for 27 images, got 28 at once"):
        whole(SMALL, small, world=2, per_device=14)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_tested_image_is_seen_once_on_one_device(world: int, small: Folder) -> None:
    transform = augment.test_transform(SMALL)
    loaders = [loader.test_loader(small, SMALL, rank=rank, world=world, per_device=4) for rank in range(world)]
    seen = []
    for rank, mine in enumerate(loaders):
        batches = list(mine)
        assert len(batches) == len(mine)
        images, labels = (torch.cat(pieces) for pieces in zip(*batches, strict=True))
        expected = range(rank, 11, world)
        assert torch.equal(images, torch.stack([transform(loader.read(small.test.path(each))) for each in expected]))
        assert labels.tolist() == small.test.labels[rank::world].tolist()
        seen += list(expected)
    assert sorted(seen) == list(range(11))
    assert list(loader.test_loader(small, SMALL, rank=12, world=13, per_device=4)) == []


def test_a_test_loader_reads_the_same_again(small: Folder) -> None:
    tested = loader.test_loader(small, replace(SMALL, workers=1), rank=0, world=1, per_device=6)
    first, second = list(tested), list(tested)
    assert [len(labels) for _, labels in first] == [6, 5]
    assert same(first, second)


def draws() -> list[float]:
    return [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(()).item()]


def test_reading_leaves_the_randomness_of_the_process_alone(small: Folder) -> None:
    def seeded() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        draws()

    seeded()
    expected = draws()
    for workers in (0, 1):
        seeded()
        assert len(whole(replace(SMALL, workers=workers), small)) == 3
        assert draws() == expected
    seeded()
    with loader.drawing(1, 2, 3):
        first = draws()
    assert draws() == expected
    with loader.drawing(1, 2, 3):
        assert draws() == first
    with loader.drawing(1, 23):
        assert not set(draws()) & set(first)


def test_an_image_is_decided_by_seed_epoch_and_number(small: Folder) -> None:
    images = Images(small.train, augment.train_transform(SMALL, small.mean), seed=5)
    assert len(images) == 27
    taken, label = images[0, 4]
    copied = pickle.loads(pickle.dumps(images))  # as it is sent to a process that was not forked
    random.seed(9)
    assert torch.equal(copied[0, 4][0], taken)
    assert label == small.train.labels[4] == 0
    for other in (images[1, 4], Images(small.train, images.transform, seed=6)[0, 4]):
        assert not torch.equal(other[0], taken)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "CMYK"])
def test_every_mode_of_bytes_becomes_colours(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("some.jpg" if mode == "CMYK" else "some.png")
    picture(path, 0, mode)
    assert (loader.read(path).mode, loader.read(path).size) == ("RGB", (26, 30))


def test_an_image_that_is_none_is_named(small: Folder, tmp_path: Path) -> None:
    clear = Image.new("P", (5, 4))
    clear.putpalette(bytes(range(30)))
    clear.save(tmp_path / "clear.png", transparency=b"\x00\x80")
    assert loader.read(tmp_path / "clear.png").mode == "RGB"
    cut = small.train.path(0).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(cut[:-300])
    (tmp_path / "no.jpg").write_bytes(b"no image")
    (tmp_path / "empty.png").touch()
    content = small.train.path(1).read_bytes()
    (tmp_path / "broken.png").write_bytes(content[:60] + bytes(40) + content[100:])
    Image.fromarray(np.full((4, 5), 40_000, np.uint16)).save(tmp_path / "deep.png")
    for name in ("cut.jpg", "no.jpg", "empty.png", "broken.png", "missing.png"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as an image: "):
            loader.read(tmp_path / name)
    with pytest.raises(ValueError, match=r"deep.png cannot be read as an image: its numbers must be bytes, got mode I"):
        loader.read(tmp_path / "deep.png")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_worker_is_one_line_and_keeps_nobody_waiting(workers: int, small: Folder) -> None:
    path = small.test.path(2)
    path.write_bytes(b"no image")
    began = time.monotonic()
    with pytest.raises(ValueError, match="cannot be read") as told:
        list(loader.test_loader(small, replace(SMALL, workers=workers), rank=0, world=1, per_device=4))
    assert str(told.value) == f"{path} cannot be read as an image: cannot identify image file {str(path)!r}"
    del told
    gc.collect()
    assert time.monotonic() - began < 4


def test_a_signal_to_all_processes_while_workers_start_ends_none(
    small: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = loader._undisturbed

    def reached_before(number: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        undisturbed(number)

    monkeypatch.setattr(loader, "_undisturbed", reached_before)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    read = list(loader.test_loader(small, replace(SMALL, workers=2), rank=0, world=1, per_device=4))
    assert sum(len(labels) for _, labels in read) == len(small.test)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files that are open are counted in /proc")
def test_no_file_stays_open(small: Folder, tmp_path: Path) -> None:
    (tmp_path / "cut.jpg").write_bytes(small.train.path(0).read_bytes()[:-300])
    before = len(os.listdir("/proc/self/fd"))
    kept = [loader.read(small.train.path(number)) for number in range(9)]
    with pytest.raises(ValueError, match="cannot be read"):
        loader.read(tmp_path / "cut.jpg")
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(kept) == 9
