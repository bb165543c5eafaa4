"""Data sets from their standard files, written here in small; and files that are missing, damaged or hostile."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convnn_lab.data import DATASETS, Data, load
from convnn_lab.data import idx as idx_files
from convnn_lab.data.cifar import CIFAR10, CIFAR100, Kind
from convnn_lab.train.source import Prepare


def pictures(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def write_python(folder: Path, kind: Kind, count: int = 6) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, name in enumerate((*kind.python[0], *kind.python[1])):
        images = pictures(count, number)
        batch = {b"data": images.reshape(count, -1), kind.label.encode(): list(range(count))}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        written.append(images)
    return np.concatenate(written[: len(kind.python[0])])


def write_binary(folder: Path, kind: Kind, count: int = 6) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, name in enumerate((*kind.binary[0], *kind.binary[1])):
        images = pictures(count, number)
        labels = np.stack([np.full(count, 99), np.arange(count)], 1)[:, -kind.before :].astype(np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, images.reshape(count, -1)], 1).tobytes())
        written.append(images)
    return np.concatenate(written[: len(kind.binary[0])])


def assert_read(data: Data, kind: Kind, images: np.ndarray) -> None:
    assert torch.equal(data.train.images, torch.from_numpy(images))
    assert data.train.labels.tolist() == list(range(6)) * (len(images) // 6)
    assert len(data.test) == 6
    assert (data.classes, data.mean, data.std) == (kind.classes, kind.mean, kind.std)


@pytest.mark.parametrize("kind", [CIFAR10, CIFAR100], ids=lambda kind: kind.name)
@pytest.mark.parametrize("write", [write_python, write_binary])
@pytest.mark.parametrize("form", ["folder", "parent", "archive", "file"])
def test_cifar_is_read_in_every_form(kind: Kind, write: Any, form: str, tmp_path: Path) -> None:
    folder = tmp_path / kind.folders[write is write_binary]
    images = write(folder, kind)
    place = {"folder": folder, "parent": tmp_path}.get(form, tmp_path / "only")
    if form in ("archive", "file"):
        place.mkdir()
        path = place / f"{kind.folders[0].split('-batches')[0]}-any.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            archive.add(folder, folder.name)
        place = path if form == "file" else place
    assert_read(load(kind.name, place), kind, images)
    assert form in ("folder", "parent") or len(list((tmp_path / "only").iterdir())) == 1  # nothing was unpacked


@pytest.mark.parametrize("last", [True, False])
def test_cifar_is_read_from_an_npz(last: bool, tmp_path: Path) -> None:
    images, labels = pictures(6), np.arange(6)[:, None]
    laid = images.transpose(0, 2, 3, 1) if last else images
    np.savez(tmp_path / "cifar10.npz", x_train=laid, y_train=labels, x_test=laid, y_test=labels)
    assert_read(load("cifar10", tmp_path), CIFAR10, images)
    assert_read(load("cifar10", tmp_path / "cifar10.npz"), CIFAR10, images)


def write_idx(folder: Path, count: int = 5, *, packed: bool = True) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    for kind in ("train", "t10k"):
        for name, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", np.arange(count, dtype=np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
            content = head + array.tobytes()
            path = folder / (f"{kind}-{name}" + (".gz" if packed else ""))
            path.write_bytes(gzip.compress(content) if packed else content)
    return images


def test_the_larger_of_two_sets_is_not_taken_for_the_smaller(tmp_path: Path) -> None:
    images, labels = np.zeros((4, 3, 32, 32), np.uint8), np.arange(4) % 10
    np.savez(tmp_path / "cifar100.npz", x_train=images, y_train=labels + 90, x_test=images, y_test=labels + 90)
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cifar10: looked for its files in"):
        load("cifar10", tmp_path)
    np.savez(tmp_path / "my-cifar10.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert load("cifar10", tmp_path).train.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = write_idx(tmp_path / "fashion-mnist", packed=packed)
    for place in (tmp_path, tmp_path / "fashion-mnist"):
        data = load("fashion-mnist", place)
        assert torch.equal(data.train.images[:, 0], torch.from_numpy(images))
        assert data.test.labels.tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(idx_files, "INSTALLED", tmp_path / "fashion-mnist")
    assert len(load("fashion-mnist").train) == 5


def test_digits_need_no_files_and_divide_without_overlap() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.images.dtype == torch.uint8
    assert data.train.images.max() == 255
    numbers = Prepare(data.mean, data.std, data.train.images.shape[-1])(data.train.images)
    assert numbers.mean().abs() < 1e-5
    assert numbers.std() == pytest.approx(1, abs=1e-3)
    assert data.to("meta").train.images.device.type == "meta"


def test_bytes_become_numbers_channel_by_channel(tmp_path: Path) -> None:
    write_python(tmp_path, CIFAR10)
    data = load("cifar10", tmp_path)
    x = Prepare(data.mean, data.std, data.train.images.shape[-1])(data.train.images)
    for channel in range(3):
        expected = (data.train.images[:, channel].double() / 255 - CIFAR10.mean[channel]) / CIFAR10.std[channel]
        torch.testing.assert_close(x[:, channel].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [32, 20])
def test_channels_may_come_last(size: int, tmp_path: Path) -> None:
    write_python(tmp_path, CIFAR10)
    data = load("cifar10", tmp_path)
    plain = Prepare(data.mean, data.std, size)(data.train.images)
    last = Prepare(data.mean, data.std, size, torch.channels_last)(data.train.images)
    assert (plain.is_contiguous(), last.is_contiguous()) == (True, False)
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, plain)


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    write_python(tmp_path, CIFAR10)
    mark = tmp_path / "ran"
    for hostile in (Hostile(mark), {b"data": Hostile(mark), b"labels": [0]}):
        (tmp_path / "data_batch_3").write_bytes(pickle.dumps(hostile))
        with pytest.raises(ValueError, match=r"data_batch_3 is not trusted or damaged: it names (posix|nt).system"):
            load("cifar10", tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(subprocess.Popen))
    with pytest.raises(ValueError, match=r"it names subprocess.Popen"):
        load("cifar10", tmp_path)
    assert not mark.exists()
    hidden = tmp_path / "npz"
    hidden.mkdir()
    np.savez(hidden / "cifar10.npz", x_train=np.array([Hostile(mark)], dtype=object))
    with pytest.raises(ValueError, match=r"is no .npz with x_train"):
        load("cifar10", hidden)
    assert not mark.exists()


def damaged(tmp_path: Path, case: str) -> Path:
    if case == "truncated archive":
        folder = tmp_path / CIFAR10.folders[0]
        write_python(folder, CIFAR10)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            archive.add(folder, folder.name)
        place = tmp_path / "only"
        place.mkdir()
        (place / "cifar-10-python.tar.gz").write_bytes(content.getvalue()[:-2000])
        return place
    if case == "npz":
        (tmp_path / "cifar10.npz").write_bytes(b"PK nothing")
        return tmp_path
    write = write_binary if case == "truncated binary" else write_python
    write(tmp_path, CIFAR10)
    if case == "missing batch":
        (tmp_path / "data_batch_4").unlink()
    elif case == "truncated binary":
        (tmp_path / "data_batch_2.bin").write_bytes(b"0" * 5000)
    elif case == "truncated pickle":
        (tmp_path / "data_batch_2").write_bytes((tmp_path / "data_batch_2").read_bytes()[:500])
    elif case == "no labels":
        (tmp_path / "data_batch_2").write_bytes(pickle.dumps({b"data": pictures(2)}))
    elif case == "labels beyond":
        batch = {b"data": pictures(2).reshape(2, -1), b"labels": [3, 12]}
        (tmp_path / "data_batch_2").write_bytes(pickle.dumps(batch))
    return tmp_path


CASES = {
    "truncated archive": r"cifar-10-python.tar.gz is damaged|is not trusted or damaged|is no batch",
    "npz": "cifar10.npz is no .npz with",
    "missing batch": "data_batch_4 is missing; get cifar-10-python.tar.gz",
    "truncated binary": "data_batch_2.bin is damaged: 5000 bytes are no multiple of 3073",
    "truncated pickle": "data_batch_2 is (not trusted or damaged|no batch of cifar10)",
    "no labels": "data_batch_2 is no batch of cifar10: b'labels'",
    "labels beyond": "labels must be from 0 to 9, got 0 to 12",
}


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_set_gives_one_clear_error(case: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=CASES[case]):
        load("cifar10", damaged(tmp_path, case))


def test_a_missing_set_says_what_was_looked_for_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"looked for its files in .* and found none; get cifar-10-python.tar.gz"):
        load("cifar10", tmp_path)
    with pytest.raises(ValueError, match="say where its files are with --data-dir"):
        load("cifar100")
    with pytest.raises(ValueError, match=r"for train-images-idx3-ubyte\[.gz\] in .*; install the Debian"):
        load("fashion-mnist", tmp_path)
    with pytest.raises(ValueError, match="unknown data set 'cifar'; known are digits, fashion-mnist"):
        load("cifar")
    assert list(DATASETS) == ["digits", "fashion-mnist", "cifar10", "cifar100"]


def test_damaged_idx_files_are_told(tmp_path: Path) -> None:
    for content, message in (
        (b"", "begins with nothing"),
        (b"\x00\x00\x0d\x01", "no IDX file of bytes: it begins with 00000d01"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 9, 1, 2]), r"is damaged: \[9\] needs 17 bytes, and it has 10"),
    ):
        path = tmp_path / "some-idx1-ubyte"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            idx_files.read(path)
    path = tmp_path / "some-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(100))[:-10])
    with pytest.raises(ValueError, match="is damaged"):
        idx_files.read(path)
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"looked for t10k-labels-idx1-ubyte\[.gz\]"):
        load("fashion-mnist", tmp_path)
