"""Files that replace others whole or not at all, and the temporary files they are made in.

A temporary file stands beside its target, under a name of our own pattern, and is locked while it is written. What a
killed process left behind is not locked any more, and is removed when the next file is written to the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ModuleNotFoundError:  # Windows, where an open file cannot be removed: there the lock is the open file itself
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".cpu-offload.tmp"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system answers where a file cannot grow: the disk, a quota or a limit of the process is reached."""

_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_OWN = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `target`, durably, when the block ends without an exception.

    Args:
        target: A file that may exist, in a folder that does. A link is replaced, not what it points to.

    Raises:
        IsADirectoryError: `target` is a folder.
        OSError: The disk is full or refuses; `target` is as it was.
    """
    if target.is_dir():
        raise IsADirectoryError(f"path={str(target)!r}: a folder is there. Give the name of a file, or remove it.")
    sweep(target.parent)
    file, temporary = _create(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(temporary, target)  # while it is locked: no other process may sweep it
        if fcntl is None:
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def sweep(folder: Path) -> None:
    """Remove temporary files of ours that nobody writes any more."""
    with os.scandir(folder) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(".") and entry.name.endswith(SUFFIX)]
    for path in found:
        with contextlib.suppress(OSError):  # locked, somebody else's, or gone by now
            _remove_abandoned(path)


def require_space(target: Path, needed: int) -> None:
    """Refuse to begin a file that cannot be finished.

    Args:
        target: Where it is to be written.
        needed: Its size in bytes.

    Raises:
        OSError: Fewer bytes are free; `errno` is `ENOSPC`.
    """
    usage = shutil.disk_usage(target.parent)
    if usage.total and usage.free < needed:
        raise disk_full(target, needed, errno.ENOSPC)


def disk_full(target: Path, needed: int, number: int) -> OSError:
    """The error for a file of `needed` bytes that did not fit; `number` is the system's own for it."""
    free = shutil.disk_usage(target.parent).free
    limit = {errno.EDQUOT: "the quota is used up", errno.EFBIG: "the limit of a file's size is lower"}
    return OSError(
        number,
        f"{limit.get(number, 'the disk is full')}: {needed:,} bytes are needed, {free:,} are free, and what was "
        "there before is intact. Free some space, keep fewer checkpoints, or write to another disk",
        str(target),
    )


def _create(target: Path) -> tuple[IO[bytes], Path]:
    while True:
        path = target.with_name(f".{target.name[:32]}.{secrets.token_hex(8)}{SUFFIX}")
        file = os.fdopen(os.open(path, _NEW, 0o666), "wb")
        if _lock(file.fileno()) and path.exists():
            return file, path
        file.close()  # swept between its making and its locking
        path.unlink(missing_ok=True)


def _lock(descriptor: int) -> bool:
    """Whether the file is ours now; true as well where files cannot be locked, for there nobody sweeps."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove_abandoned(path: str) -> None:
    if fcntl is None:
        os.unlink(path)  # refused while it is open
        return
    descriptor = os.open(path, _OWN)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Make the rename itself durable; a folder cannot be opened on Windows."""
    if fcntl is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
