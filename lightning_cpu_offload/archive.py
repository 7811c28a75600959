"""Whether a file is a whole, unharmed one of `torch.save`, told before anything is made of it."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

_CHUNK_BYTES = 1 << 20
_LEGACY_START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # of files of torch before 1.6, which are no archives
_FOREIGN = {b"\x89HDF": "an HDF5 file", b"\x1f\x8b": "a gzip archive", b"GGUF": "a GGUF file"}


class BadCheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the first thing that is wrong with it."""


def read(source: Path | IO[bytes], name: str, map_location: Any, weights_only: bool) -> Any:
    """What is in the file. That of a path is mapped: tensors are read when they are used, and take no memory before.

    Args:
        source: A file of `torch.save`.
        name: What error messages call it.
        map_location: As for `torch.load`.
        weights_only: Rebuild tensors and plain values only. False runs whatever code the file asks for.

    Raises:
        BadCheckpointError: It is no such file, or is one that only arbitrary code can rebuild.
    """
    mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
    if not weights_only:
        return torch.load(source, map_location=map_location, weights_only=False, mmap=mapped)
    try:
        return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # the file alone decides what happens here, so whatever happens is its fault
        raise BadCheckpointError(f"{name}: {_explanation(error)}") from error


def require_kind(path: Path) -> None:
    """Say what a file is that `torch.save` did not write, or not to the end.

    Raises:
        FileNotFoundError: It is not there.
        BadCheckpointError: It is something else, or only the beginning of a checkpoint.
    """
    if not path.exists():
        raise FileNotFoundError(f"checkpoint file not found: {path}")
    if path.is_dir():
        raise BadCheckpointError(
            f"{path}: a folder, such as DeepSpeed and FSDP write. Consolidate it into one file with their own tools."
        )
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        size = path.stat().st_size
        raise BadCheckpointError(
            f"{path}: truncated, its {size:,} bytes end before its index. Take an older checkpoint, or copy it again."
        )
    if start.startswith((b"PK", _LEGACY_START)):
        return
    kinds = [kind for magic, kind in _FOREIGN.items() if start.startswith(magic)]
    if start[8:9] == b"{":
        kinds.append("a safetensors file")
    kind = kinds[0] if kinds else ("not a file that torch.save wrote" if start else "empty")
    raise BadCheckpointError(
        f"{path}: {kind}. A checkpoint to resume from is one that Trainer.save_checkpoint wrote; mere weights are "
        "loaded with module.load_state_dict."
    )


def require_unharmed(path: Path, advance: Callable[[int], object]) -> None:
    """Compare every part of the file with its checksum: one pass over the file, in little memory.

    Args:
        path: A file that `require_kind` let pass.
        advance: Called with the number of bytes read since the last call.

    Raises:
        BadCheckpointError: Names the first part that has changed since it was written.
    """
    if not zipfile.is_zipfile(path):
        return  # files of torch before 1.6 hold no checksums
    part = "its index"
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                part = info.filename
                with archive.open(info) as member:
                    while chunk := member.read(_CHUNK_BYTES):
                        advance(len(chunk))
    except Exception as error:  # a harmed index fails in many ways
        raise BadCheckpointError(
            f"{path}: corrupted, first in {part!r} ({error}). Take an older checkpoint, or copy the file again. "
            "StreamingCheckpointIO(verify=False) loads it as it is."
        ) from error


def require_checkpoint(checkpoint: Any, path: str) -> None:
    """Refuse what loads well but is no checkpoint of a Trainer.

    Raises:
        BadCheckpointError: Says what it is instead.
    """
    if not isinstance(checkpoint, dict):
        raise BadCheckpointError(f"{path}: holds a {type(checkpoint).__name__}, not a checkpoint of Lightning's.")
    for key in ("pytorch-lightning_version", "state_dict"):
        if key not in checkpoint:
            tensors = sum(isinstance(value, torch.Tensor) for value in checkpoint.values())
            what = f"{tensors} tensors" if tensors else f"the keys {sorted(map(str, checkpoint))[:5]}"
            raise BadCheckpointError(
                f"{path}: no checkpoint of Lightning's: it holds {what} and no {key!r}. If these are weights, load "
                "them with module.load_state_dict and fit without ckpt_path."
            )


def _explanation(error: Exception) -> str:
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused is None:
        first = str(error).strip().splitlines()[:1] or [""]
        return f"cannot be read ({type(error).__name__}: {first[0]}). Take an older checkpoint, or copy it again."
    return (
        f"holds {refused.group(1)}, which is rebuilt by running code from the file, and weights_only=True refuses "
        "that. Allow this one by torch.serialization.add_safe_globals; or, if you trust whoever wrote the file, pass "
        "weights_only=False to Trainer.fit or to StreamingCheckpointIO."
    )
