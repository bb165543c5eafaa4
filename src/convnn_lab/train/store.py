"""Files that are whole or not there: written beside, flushed, then moved to their place in one step."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


class StorageError(OSError):
    """Something could not be written; what was there before still is."""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Say in one line why ``path`` could not be written, whichever library found out."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}; what was written before is intact"
        ) from None
    except Exception as error:
        # Writers of tensors have errors of their own for a disk that is full.
        if type(error).__module__.split(".")[0] not in ("builtins", "safetensors_rust", "safetensors"):
            raise
        if isinstance(error, RuntimeError) or "afetensor" in type(error).__name__:
            said = f"cannot write {path}: {str(error).splitlines()[0]}"
            raise StorageError(f"{said}; is the disk full? What was written before is intact") from None
        raise


def write(path: Path, content: str | bytes) -> None:
    """Write a file in one step."""
    beside = path.with_name(f".{path.name}.new")
    with storing(path):
        try:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
            _flush(beside)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write an object for people and machines to read."""
    write(path, json.dumps(_plain(content), indent=2, allow_nan=False) + "\n")


def _plain(content: Any) -> Any:
    """What is not a number is null in a file that others read."""
    if isinstance(content, dict):
        return {name: _plain(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content


def read_json(path: Path) -> Any:
    """Read what ``write_json`` wrote."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def write_folder(
    folder: Path, files: dict[str, Callable[[Path], None]], about: dict[str, Any], before: Path | None = None
) -> None:
    """Write several files that belong together, with their checksums; the folder they replace becomes ``before``."""
    beside = folder.with_name(f".{folder.name}.new")
    with storing(folder):
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            sums = {}
            for name, write_file in files.items():
                write_file(beside / name)
                _flush(beside / name)
                sums[name] = {"bytes": (beside / name).stat().st_size, "crc32": checksum(beside / name)}
            (beside / MANIFEST).write_text(json.dumps({**about, "files": sums}, indent=2) + "\n")
            _flush(beside / MANIFEST)
            if before is not None and (folder / MANIFEST).exists():
                shutil.rmtree(before, ignore_errors=True)
                os.replace(folder, before)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            os.replace(beside, folder)
            _flush(folder.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def damage(folder: Path) -> str | None:
    """Say what is wrong with a folder that ``write_folder`` wrote, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, said in files.items():
            size = (folder / name).stat().st_size
            if size != said["bytes"]:
                return f"{name} has {size} bytes and should have {said['bytes']}"
            if checksum(folder / name) != said["crc32"]:
                return f"{name} does not have the checksum it was written with"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    total = 0
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            total = zlib.crc32(part, total)
    return total


def _flush(path: Path) -> None:
    """Let the disk have it, so that not even a power cut leaves half of it under its name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
