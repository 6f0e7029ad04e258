"""Files that are either whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from deepssm.errors import DeepSSMError


def cache() -> Path:
    """The folder for what can be made again: DEEPSSM_CACHE, or one in the user's home."""
    return Path(os.environ.get("DEEPSSM_CACHE", Path.home() / ".cache" / "deepssm"))


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file through a temporary one beside it, so that a kill or a full disk leaves the old file intact."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise DeepSSMError(f"Cannot write {path}: {error}. Give a folder with room that you may write to.") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def write_text(path: Path, text: str) -> None:
    write(path, lambda file: file.write(text.encode()))


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def digest(content: Any, length: int) -> str:
    """A name for what a JSON text can say."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:length]


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """An .npz archive."""
    write(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def read_arrays(path: Path, remedy: str, names: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """What `write_arrays` wrote, all of it or some arrays. The archive has a checksum of every array."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in names or archive.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise DeepSSMError(f"{path} is not a whole .npz file: {error}. {remedy}") from error


def read_json(path: Path) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise DeepSSMError(f"No file {path}. Is the folder a run made by 'deepssm train'?") from error
    except (OSError, ValueError) as error:
        raise DeepSSMError(f"Cannot read {path} as JSON: {error}.") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
