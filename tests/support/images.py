"""File systems of the test's own, mounted in a temporary folder."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from kvio.testing import LoopDevice

_MNT_DETACH = 2
_MIN_MIB = {"ext4": 8, "xfs": 320}


def _unmount(folder):
    """Unmounts, waiting a moment for a file that is just being closed; then detaches it anyway."""
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(50):
        if libc.umount2(folder.encode(), 0) == 0:
            return
        time.sleep(0.02)
    libc.umount2(folder.encode(), _MNT_DETACH)


@contextlib.contextmanager
def mounted(kind, *, size_bytes, options="", sector=512):
    """Mounts a new ``kind`` ("ext4", "xfs" or "tmpfs") and gives its folder as a Path.

    ext4 and xfs lie on a loop device over memory, so that nothing of them survives the process and
    a slow disk changes no test.
    """
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix=f"kvio-{kind}-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if kind == "tmpfs":
            words = ",".join(filter(None, [f"size={size_bytes}", options]))
            command = ["mount", "-t", "tmpfs", "-o", words, "kvio-test", folder]
        else:
            device = stack.enter_context(formatted(kind, size_bytes=size_bytes, sector=sector))
            command = ["mount", "-t", kind, *(["-o", options] if options else []), device, folder]
        subprocess.run(command, check=True, capture_output=True)
        stack.callback(_unmount, folder)
        yield Path(folder)


@contextlib.contextmanager
def formatted(kind, *, size_bytes, sector=512):
    """A loop device that carries an ext4 or xfs file system; gives its path, not mounted."""
    if size_bytes < _MIN_MIB[kind] << 20:
        raise ValueError(f"{kind} needs at least {_MIN_MIB[kind]} MiB")
    quiet = {"ext4": ["-q", "-F"], "xfs": ["-q", "-f"]}[kind]
    image = os.memfd_create(f"kvio-{kind}")
    try:
        os.ftruncate(image, size_bytes)
        with LoopDevice(image, sector=sector) as loop:
            tool = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
            subprocess.run([tool, *quiet, loop.path], check=True, capture_output=True)
            yield loop.path
    finally:
        os.close(image)


@contextlib.contextmanager
def full(folder):
    """Fills the file system of ``folder`` to the last block, and frees it again."""
    ballast = Path(folder, "ballast")
    with open(ballast, "wb", buffering=0) as out:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while out.write(b"\1" * size) == size:
                    pass
    try:
        yield
    finally:
        ballast.unlink()
