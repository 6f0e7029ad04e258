"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

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
