"""Files as members: preallocated and written through, so that later writes only overwrite."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
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
    if not names or not all(names):
        raise ValueError("paths: at least one path expected, and none of them empty")
    if len(set(map(os.path.abspath, names))) != len(names):
        raise ValueError("paths: each file once")
    if not 0 < size_bytes < 1 << 63 or size_bytes % _BLOCK:
        raise ValueError(f"size_bytes={size_bytes}: a positive multiple of {_BLOCK} expected")
    for name in names:
        _check_free(name, overwrite)
    written: dict[str, str] = {}  # temporary -> name
    placed: list[str] = []
    try:
        with Progress(
            console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        ) as progress:
            task = progress.add_task("writing members", total=len(names) * size_bytes)
            for name in names:
                _write_one(name, size_bytes, written, lambda n: progress.advance(task, n))
        # Nothing that was there is touched before all of them are whole.
        for temporary, name in written.items():
            _place(temporary, name, overwrite)
            placed.append(name)
    except BaseException as exc:
        # what took the place of a file is kept: what it replaced is gone, and it is whole
        for path in [*written, *([] if overwrite else placed)]:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if isinstance(exc, OSError) and exc.errno is not None:
            done = overwrite and placed
            kept = f"replaced by then: {', '.join(placed)}" if done else "nothing was changed"
            raise make_error(
                exc.errno,
                f"{exc.filename or 'a member'}: {os.strerror(exc.errno)} while a member of "
                f"{size_bytes} bytes was made; {kept}",
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


def _write_one(
    name: str, size_bytes: int, written: dict[str, str], advance: Callable[[int], None]
) -> None:
    """Blocks are written, not only reserved: an unwritten extent would have to be converted at the
    first write, which costs a journal commit and serialises direct writers."""
    temporary = f"{name}.creating-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        exc.filename = name
        raise
    written[temporary] = name
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


def _place(temporary: str, name: str, overwrite: bool) -> None:
    """Gives the file its name; without ``overwrite`` never over one that came meanwhile."""
    try:
        if overwrite:
            os.replace(temporary, name)
        else:
            os.link(temporary, name)
            os.unlink(temporary)
    except OSError as exc:
        if overwrite or exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            exc.filename = name
            raise
        os.replace(temporary, name)  # a file system without hard links
    folder = os.open(os.path.dirname(name) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # the name itself survives a crash too
    finally:
        os.close(folder)
