"""CIFAR-10 and CIFAR-100: the python and the binary distribution, as a folder or an archive, and ``.npz`` files."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convnn_lab.data.arrays import Arrays, Data, checked


@dataclass(frozen=True)
class Kind:
    """What differs between the two."""

    name: str
    names: tuple[str, ...]
    python: tuple[tuple[str, ...], tuple[str, ...]]
    binary: tuple[tuple[str, ...], tuple[str, ...]]
    folders: tuple[str, str]
    label: str
    before: int
    """bytes of labels before an image, of which the last counts"""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.names)


# Means and deviations as the thesis gives them.
CIFAR10 = Kind(
    "cifar10",
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    (tuple(f"data_batch_{n}" for n in range(1, 6)), ("test_batch",)),
    (tuple(f"data_batch_{n}.bin" for n in range(1, 6)), ("test_batch.bin",)),
    ("cifar-10-batches-py", "cifar-10-batches-bin"), "labels", 1,
    (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
)  # fmt: skip
FINE = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm"
)
CIFAR100 = Kind(
    "cifar100", tuple(FINE.split()), (("train",), ("test",)), (("train.bin",), ("test.bin",)),
    ("cifar-100-python", "cifar-100-binary"), "fine_labels", 2,
    (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761),
)  # fmt: skip

Open = Callable[[str], bytes]


def cifar10(data_dir: Path | None) -> Data:
    """Read CIFAR-10: 50,000 and 10,000 images of 32 by 32."""
    return _read(CIFAR10, data_dir)


def cifar100(data_dir: Path | None) -> Data:
    """Read CIFAR-100, with its fine labels."""
    return _read(CIFAR100, data_dir)


def _read(kind: Kind, data_dir: Path | None) -> Data:
    if data_dir is None:
        raise ValueError(f"{kind.name}: say where its files are with --data-dir; {_how(kind)}")
    train, test = _found(kind, data_dir)
    return Data(kind.name, train, test, kind.names, kind.mean, kind.std)


def _how(kind: Kind) -> str:
    number = kind.name.removeprefix("cifar")
    archives = f"cifar-{number}-python.tar.gz or cifar-{number}-binary.tar.gz"
    return f"get {archives} from the data set's home page, or a .npz with x_train, y_train, x_test, y_test"


def _found(kind: Kind, place: Path) -> tuple[Arrays, Arrays]:
    """Read whatever form the data set has at a place: a folder, or a file itself."""
    files = [place] if place.is_file() else sorted(place.glob("*")) if place.is_dir() else []
    for path in files:
        if path.suffix == ".npz" and (path == place or re.search(rf"{kind.name}(?!\d)", path.stem)):
            return _npz(kind, path)
    for names, read in ((kind.python, _python), (kind.binary, _binary)):
        for folder in (place, *(place / name for name in kind.folders)):
            if (folder / names[0][0]).is_file():
                return _parts(kind, names, lambda name, folder=folder: (folder / name).read_bytes(), read, folder)  # type: ignore[misc]
    for path in files:
        starts = "|".join(folder.split("-batches")[0] for folder in kind.folders)
        if re.match(rf"(?:{starts})(?!\d)", path.name) and ".tar" in path.name:
            return _archive(kind, path)
    raise ValueError(f"{kind.name}: looked for its files in {place} and found none; {_how(kind)}")


def _archive(kind: Kind, path: Path) -> tuple[Arrays, Arrays]:
    """Read the members of an archive where they are; nothing is written."""
    try:
        with tarfile.open(path) as archive:
            members = {Path(member.name).name: member for member in archive.getmembers() if member.isfile()}

            def content(name: str) -> bytes:
                if name not in members:
                    raise ValueError(f"{path} has no {name}")
                file = archive.extractfile(members[name])
                return b"" if file is None else file.read()

            names, read = (kind.python, _python) if kind.python[0][0] in members else (kind.binary, _binary)
            return _parts(kind, names, content, read, path)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _parts(kind: Kind, names: Any, content: Open, read: Any, source: Path) -> tuple[Arrays, Arrays]:
    parts = []
    for files in names:
        try:
            pieces = [read(kind, content(name), source / name) for name in files]
        except FileNotFoundError as error:
            raise ValueError(f"{kind.name}: {error.filename} is missing; {_how(kind)}") from None
        images, labels = (np.concatenate(each) for each in zip(*pieces, strict=True))
        parts.append(checked(images, labels, classes=kind.classes, shape=(3, 32, 32), source=source))
    return parts[0], parts[1]


def _python(kind: Kind, content: bytes, source: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = Restricted(io.BytesIO(content), encoding="bytes").load()
        images, labels = batch[b"data"], np.asarray(batch[kind.label.encode()])
        return images.reshape(-1, 3, 32, 32), labels
    except pickle.UnpicklingError as error:
        raise ValueError(f"{source} is not trusted or damaged: {error}") from None
    except (KeyError, TypeError, ValueError, EOFError, AttributeError, IndexError) as error:
        raise ValueError(f"{source} is no batch of {kind.name}: {error}") from None


def _binary(kind: Kind, content: bytes, source: Path) -> tuple[np.ndarray, np.ndarray]:
    size = kind.before + 3072
    if not content or len(content) % size:
        raise ValueError(f"{source} is damaged: {len(content)} bytes are no multiple of {size}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, size)
    return rows[:, kind.before :].reshape(-1, 3, 32, 32), rows[:, kind.before - 1]


def _npz(kind: Kind, path: Path) -> tuple[Arrays, Arrays]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no .npz with x_train, y_train, x_test, y_test: {error}") from None
    parts = []
    for name in ("train", "test"):
        images, labels = arrays[f"x_{name}"], arrays[f"y_{name}"].reshape(-1)
        if images.ndim == 4 and images.shape[-1] == 3:
            images = images.transpose(0, 3, 1, 2)
        parts.append(checked(images, labels, classes=kind.classes, shape=(3, 32, 32), source=path))
    return parts[0], parts[1]


class Restricted(pickle.Unpickler):
    """An unpickler that makes arrays and nothing else."""

    ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """Refuse whatever is not needed to make an array."""
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data set needs")
        return super().find_class(module, name)
