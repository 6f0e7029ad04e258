"""What training leaves on disk: checkpoints and the log.

A checkpoint is one file with a JSON header and the leaves of a pytree, written atomically, without pickle.

deepssm-checkpoint 1\\n      magic and version
{...}\\n                     header: whatever the caller wants to know before it builds the tree
<sha-256 in hex>\\n          of header and leaves
leaves                      as NumPy arrays, one after the other
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import IO, Any, TypeVar

import equinox as eqx
import jax
from numpy.typing import NDArray

from deepssm import files
from deepssm.errors import DeepSSMError

MAGIC = b"deepssm-checkpoint 1\n"
Tree = TypeVar("Tree")


def save(path: Path, header: dict[str, Any], tree: Any) -> None:
    payload = io.BytesIO()
    eqx.tree_serialise_leaves(payload, tree)
    head = json.dumps(header).encode() + b"\n"
    digest = hashlib.sha256(head + payload.getbuffer()).hexdigest().encode() + b"\n"

    def fill(file: IO[bytes]) -> None:
        for part in (MAGIC, head, digest, payload.getbuffer()):
            file.write(part)

    files.write(path, fill)


def read_header(path: Path) -> dict[str, Any]:
    return _read(path)[0]


def load(path: Path, like: Tree) -> Tree:
    """The tree of a checkpoint, built on one of the same structure and shapes."""
    _, payload = _read(path)
    try:
        tree = eqx.tree_deserialise_leaves(io.BytesIO(payload), like)
    except (RuntimeError, ValueError, EOFError, TypeError) as error:
        raise DeepSSMError(
            f"The arrays in {path} do not fit this model: {error}. "
            "It was written for other sizes; use the configuration it was trained with."
        ) from error
    return jax.tree.map(lambda old, new: jax.numpy.asarray(new) if eqx.is_array(old) else new, like, tree)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DeepSSMError(f"Cannot read the checkpoint {path}: {error}. Train first with 'deepssm train'.") from error
    if not content.startswith(MAGIC):
        raise DeepSSMError(f"{path} is not a deepssm checkpoint: it does not begin with {MAGIC.decode().strip()!r}.")
    head, _, rest = content[len(MAGIC) :].partition(b"\n")
    digest, _, payload = rest.partition(b"\n")
    if hashlib.sha256(head + b"\n" + payload).hexdigest().encode() != digest:
        raise DeepSSMError(
            f"{path} is truncated or altered: its checksum is wrong. Take an intact copy or train again."
        )
    return json.loads(head), payload


class Log:
    """metrics.jsonl: a line for each seed and each `EVERY` steps, with the means over these steps.

    Metrics come by name, each (seeds, steps).
    """

    EVERY = 20

    def __init__(self, path: Path, step: int):
        """Goes on after a step: what an interrupted run wrote beyond its checkpoint is dropped."""
        self.path = path
        kept = []
        if step and path.exists():
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except ValueError:
                    break
        files.write_text(path, "".join(kept))

    def write(self, step: int, metrics: dict[str, NDArray[Any]], seeds: tuple[int, ...]) -> None:
        lines = []
        length = metrics["distortion"].shape[1]
        for begin in range(0, length, self.EVERY):
            end = min(begin + self.EVERY, length)
            for index, seed in enumerate(seeds):
                means = {name: float(values[index, begin:end].mean()) for name, values in metrics.items()}
                lines.append(json.dumps({"step": step + end, "seed": seed, **means}) + "\n")
        try:
            with self.path.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            raise DeepSSMError(f"Cannot write {self.path}: {error}. Make room, then go on with --resume.") from error
