"""Checkpoints written straight to disk, whole or not at all.

Lightning's own CheckpointIO builds the file in memory first, which takes once or twice the size of the state again.
Here the state is written to a temporary file in the same folder, flushed to the disk and renamed: memory does not
grow, and a crash at any moment leaves the previous file as it was.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_cpu_offload.namespaces import in_each_namespace

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO as Base
else:
    Base = object


class CheckpointIOHooks(Base):
    """Saves to and loads from local files without a second copy of the state; remote paths go Lightning's way."""

    _variants: dict[str, type]

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`, replacing what is there only when all of it is on the disk."""
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:32]}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)

    @override
    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Map the file into memory: tensors are read from it as they are copied to where they belong."""
        if _is_remote(path):
            return super().load_checkpoint(path, map_location, weights_only)
        if not Path(path).exists():
            raise FileNotFoundError(f"checkpoint file not found: {path}")
        is_zip = zipfile.is_zipfile(path)  # files of torch before 1.6 are not, and cannot be mapped
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=is_zip)


if TYPE_CHECKING:
    StreamingCheckpointIO = CheckpointIOHooks
else:
    StreamingCheckpointIO = in_each_namespace(
        "StreamingCheckpointIO", CheckpointIOHooks, "plugins.io.TorchCheckpointIO"
    )


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; a folder cannot be opened on Windows."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
