"""Files as members: preallocated and written through, so that later writes only overwrite."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import Progress

from kvio.errors import make_error

__all__ = ["create_members"]

_BLOCK = 4096
_CHUNK = 8 << 20


def create_members(
    paths: Sequence[str | os.PathLike[str]], *, size_bytes: int, overwrite: bool = False
) -> list[str]:
    """See :meth:`kvio.Volume.create`."""
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(f"paths: a list of paths expected, not one path: [{paths!r}]?")
    names = [os.fspath(path) for path in paths]
    if not names:
        raise ValueError("paths: at least one path expected")
    if len(set(map(os.path.abspath, names))) != len(names):
        raise ValueError("paths: each file once")
    if size_bytes <= 0 or size_bytes % _BLOCK:
        raise ValueError(f"size_bytes={size_bytes}: a positive multiple of {_BLOCK} expected")
    for name in names:
        _check_free(name, overwrite)
    made: list[str] = []
    try:
        with Progress(
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        ) as progress:
            task = progress.add_task("writing members", total=len(names) * size_bytes)
            for name in names:
                _create_one(name, size_bytes, made, lambda n: progress.advance(task, n))
    except BaseException as exc:
        for name in made:
            with contextlib.suppress(OSError):
                os.unlink(name)
        if isinstance(exc, OSError) and exc.errno is not None:
            raise make_error(
                exc.errno,
                f"{exc.filename or 'a member'}: {os.strerror(exc.errno)} while {size_bytes} bytes "
                f"were written; nothing was kept",
                path=exc.filename,
                op="create",
            ) from exc
        raise
    return names


def _check_free(name: str, overwrite: bool) -> None:
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise make_error(
            errno.EEXIST, f"{name} exists and is no regular file", path=name, op="create"
        )
    if not overwrite:
        raise make_error(
            errno.EEXIST,
            f"{name} exists; remove it, or give overwrite=True to lose its contents",
            path=name,
            op="create",
        )


def _create_one(
    name: str, size_bytes: int, made: list[str], advance: Callable[[int], None]
) -> None:
    """Blocks are written, not only reserved: an unwritten extent would have to be converted at the
    first write, which costs a journal commit and serialises direct writers."""
    temporary = f"{name}.creating-{os.getpid()}"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        exc.filename = name
        raise
    made.append(temporary)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        zeros = bytes(min(_CHUNK, size_bytes))
        done = 0
        while done < size_bytes:
            done += (n := os.pwrite(fd, zeros[: size_bytes - done], done))
            advance(n)
        os.fsync(fd)
    except OSError as exc:
        exc.filename = name
        raise
    finally:
        os.close(fd)
    os.replace(temporary, name)
    made[-1] = name
    folder = os.open(os.path.dirname(name) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the name itself survives a crash too
    finally:
        os.close(folder)
