"""Checkpoints written straight to disk, whole or not at all, and read without a second copy.

Lightning's own CheckpointIO builds the file in memory first, which takes once or twice the size of the state again.
Here the state is written to a temporary file in the same folder, flushed to the disk and renamed: memory does not
grow, and a crash at any moment leaves the previous file as it was.
"""

# No `from __future__ import annotations`: the command line reads the types of the constructor.
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from tqdm.auto import tqdm
from typing_extensions import override

from lightning_cpu_offload import archive
from lightning_cpu_offload.atomic import FULL, disk_full, replacing, require_space
from lightning_cpu_offload.namespaces import in_each_namespace, rank_zero

if TYPE_CHECKING:
    from lightning.pytorch.plugins.io import TorchCheckpointIO as Base
else:
    Base = object

_WRITE_BYTES = 16 << 20


class CheckpointIOHooks(Base):
    """Saves to and loads from local files without a second copy of the state; remote paths go through fsspec.

    Args:
        on_disk_full: What to do where a checkpoint does not fit on the disk: `"raise"`, or `"warn"`: training goes on,
            and older checkpoints are kept until a newer one is written.
        weights_only: What a load may rebuild where its caller does not say: True: tensors and plain values. False
            runs whatever code the file asks for, as `torch.load(weights_only=False)` does.
        verify: Compare a file with its checksums before loading it, one more pass over the file.
        progress_bytes: Size of files, in bytes, from which on a progress bar is shown. None: never.

    Raises:
        ValueError: `on_disk_full` is neither `"raise"` nor `"warn"`.
    """

    _variants: dict[str, type]
    _namespace: str

    def __init__(
        self,
        *,
        on_disk_full: Literal["raise", "warn"] = "raise",
        weights_only: bool = True,
        verify: bool = True,
        progress_bytes: int | None = 1 << 30,
    ) -> None:
        if on_disk_full not in ("raise", "warn"):
            raise ValueError(f"on_disk_full={on_disk_full!r}: one of 'raise', 'warn'. Choose one of them.")
        super().__init__()
        self._on_disk_full = on_disk_full
        self._weights_only = weights_only
        self._verify = verify
        self._progress_bytes = progress_bytes
        self._failed = False
        self._to_remove: list[str | Path] = []

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`, replacing what is there only when all of it is on the disk.

        Raises:
            OSError: It does not fit on the disk, and `on_disk_full` is `"raise"`.
        """
        target = _local(path)
        if storage_options is not None or target is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._write(checkpoint, target)
        except OSError as error:
            if error.errno not in FULL or self._on_disk_full == "raise":
                raise
            self._failed = True
            warnings.warn(f"no checkpoint was written, training goes on: {error}.", stacklevel=2)
            return
        self._failed = False
        waiting, self._to_remove = self._to_remove, []
        for outdated in waiting:
            if outdated != path:
                super().remove_checkpoint(outdated)

    @override
    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Map the file into memory: tensors are read from it as they are copied to where they belong.

        Raises:
            FileNotFoundError: Nothing is there.
            BadCheckpointError: A file that is truncated, corrupted, foreign, or needs code of its own to be rebuilt.
        """
        only = self._weights_only if weights_only is None else weights_only
        source = _local(path)
        if source is None:
            return _load_remote(str(path), map_location, only)
        archive.require_kind(source)
        if self._verify:
            with self._progress("verifying", source, source.stat().st_size) as advance:
                archive.require_unharmed(source, advance)
        return archive.read(source, str(source), map_location, only)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint; while newer ones do not fit on the disk, the old one is kept until one does."""
        if self._failed:
            self._to_remove.append(path)
        else:
            super().remove_checkpoint(path)

    def _write(self, checkpoint: dict[str, Any], target: Path) -> None:
        needed = _nbytes(checkpoint)
        require_space(target, needed)
        try:
            with replacing(target) as file, self._progress("saving", target, needed) as advance:
                _save(checkpoint, _Watched(file, advance))
        except OSError as error:
            raise (disk_full(target, needed, error.errno) if error.errno in FULL else error) from None

    @contextmanager
    def _progress(self, verb: str, path: Path, nbytes: int) -> Iterator[Callable[[int], object]]:
        """What to call with each number of bytes done; shows them for a large file, on one rank."""
        small = self._progress_bytes is None or nbytes < self._progress_bytes
        if small or getattr(rank_zero(self._namespace, "rank_zero_only"), "rank", 0) != 0:
            yield lambda _: None  # not even a hidden bar, which would start a thread
            return
        with tqdm(
            desc=f"{verb} {path.name}", total=nbytes, unit="B", unit_scale=True, unit_divisor=1024, leave=False
        ) as bar:
            yield bar.update


if TYPE_CHECKING:
    StreamingCheckpointIO = CheckpointIOHooks
else:
    StreamingCheckpointIO = in_each_namespace(
        "StreamingCheckpointIO", CheckpointIOHooks, "plugins.io.TorchCheckpointIO"
    )


class _Watched:
    """A file that counts what is written to it, in pieces small enough to show."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], object]) -> None:
        self._file = file
        self._advance = advance

    def write(self, data: Any) -> int:
        for start in range(0, len(data), _WRITE_BYTES):
            self._advance(self._file.write(data[start : start + _WRITE_BYTES]))
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def _save(checkpoint: dict[str, Any], file: Any) -> None:
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch closes its archive whatever happened, and complains of its end rather than of the cause.
        cause = error.__context__
        raise cause if isinstance(cause, (OSError, KeyboardInterrupt)) else error from None
    finally:
        torch.serialization.set_crc32_options(checksums)


def _load_remote(path: str, map_location: Any, weights_only: bool) -> Any:
    filesystem, name = url_to_fs(path)
    if not filesystem.exists(name):
        raise FileNotFoundError(f"checkpoint file not found: {path}")
    with filesystem.open(name, "rb") as file:
        return archive.read(file, path, map_location, weights_only)


def _local(path: str | Path) -> Path | None:
    """The path on this machine, None for what only fsspec can reach."""
    if "://" not in str(path):
        return Path(path)
    filesystem, name = url_to_fs(str(path))
    return Path(name) if isinstance(filesystem, LocalFileSystem) else None


def _nbytes(value: Any) -> int:
    """Bytes that the tensors in a checkpoint take on the disk; each memory is written once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(value)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
