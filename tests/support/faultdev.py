"""A disk that fails, shortens, stalls and records on request: a FUSE file under a loop device.

The file system runs in a process of its own (faultfs.py), is driven through a socket, and goes away
within about a second of this process, however that ends: a stall can delay a test, never outlive
it. A stall that nobody releases ends by itself after ``max_stall_seconds``.

    with FaultDevice(64 << 20) as disk:
        disk.fail("read", offset=1 << 20, length=4096)          # EIO
        stall = disk.stall("read")
        ...                                                     # start reads of disk.device
        disk.wait_stalled(1)
        stall.release()
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvio.testing import LoopDevice

_SERVER = Path(__file__).with_name("faultfs.py")


class Fault:
    """A rule that is in force until :meth:`remove`."""

    def __init__(self, disk, ident):
        self._disk = disk
        self._id = ident

    @property
    def hits(self):
        """How many requests it has met."""
        return self._disk._call("hits", id=self._id)

    def release(self, count=None):
        """Lets the oldest ``count`` stalled requests (None: all of them) go on."""
        return self._disk._call("release", id=self._id, count=count)

    def remove(self):
        """Ends the fault, and lets go on what it had stalled."""
        self._disk._call("drop", id=self._id)


class FaultDevice:
    """The disk, as a block device and as a file.

    Parameters
    ----------
    size_bytes
        A multiple of ``sector``.
    sector
        Logical block size of the loop device in bytes.
    loop
        False: only the file, for tests of short reads (a loop device retries those itself).
    max_stall_seconds
        A request that stalls longer goes on by itself, so that a test that hangs hangs no longer.

    Attributes
    ----------
    path : str
        The file in the FUSE file system; supports O_DIRECT.
    device : str
        The loop device over it.
    """

    def __init__(self, size_bytes, *, sector=4096, loop=True, max_stall_seconds=120.0):
        self._ids = itertools.count(1)
        self._loop = None
        self._control = None
        self._server = None
        self._folder = tempfile.mkdtemp(prefix="kvio-fault-")
        try:
            self._start(size_bytes, max_stall_seconds)
            self.path = str(Path(self._folder, "disk"))
            if loop:
                self._loop = LoopDevice(self.path, sector=sector)
                self.device = self._loop.path
        except BaseException:
            self.close()
            raise

    def _start(self, size_bytes, max_stall_seconds):
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [
                    sys.executable,
                    "-Es",
                    str(_SERVER),
                    self._folder,
                    str(size_bytes),
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(max_stall_seconds),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # a Ctrl-C in the terminal is ours to handle; the server ends after us
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"},
            )
        self._lines = self._control.makefile("r")
        self._control.settimeout(30)
        if not self._lines.readline():
            reason = self._server.stderr.read().decode().strip().splitlines()[-1:]
            raise OSError(errno.ENOTSUP, f"the FUSE fault device did not start: {reason}")

    def _call(self, do, **args):
        self._control.sendall(json.dumps({"do": do, "args": args}).encode() + b"\n")
        line = self._lines.readline()
        if not line:
            raise RuntimeError(
                f"the fault device's process is gone: {self._server.stderr.read()!r}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"fault device: {do}: {reply['error']}")
        return reply["value"]

    def _rule(self, kind, op, offset, length, times, value=None):
        if op not in ("read", "write", "flush"):
            raise ValueError(f"op is {op!r}; a fault is for 'read', 'write' or 'flush'")
        ident = next(self._ids)
        end = 1 << 62 if length is None else offset + length
        self._call(
            "rule", id=ident, kind=kind, op=op, start=offset, end=end, times=times, value=value
        )
        return Fault(self, ident)

    def fail(self, op, *, offset=0, length=None, code=errno.EIO, times=None):
        """Requests that touch the byte range fail with ``code``, ``times`` times (None: always)."""
        return self._rule("fail", op, offset, length, times, code)

    def short(self, op, keep, *, offset=0, length=None, times=None):
        """Such requests transfer their first ``keep`` bytes only (seen through :attr:`path`)."""
        return self._rule("short", op, offset, length, times, keep)

    def stall(self, op, *, offset=0, length=None, times=None):
        """Such requests get no answer before :meth:`Fault.release`."""
        return self._rule("stall", op, offset, length, times)

    def clear(self):
        """Ends every fault and releases every stall."""
        self._call("drop")

    def stalled(self):
        """The requests that wait now: a list of [op, offset, length], oldest first."""
        return self._call("stalled")

    def wait_stalled(self, count=1, timeout=20.0):
        """Returns when at least ``count`` requests wait; TimeoutError when they do not come."""
        got = self._call("wait_stalled", count=count, timeout=timeout)
        if got < count:
            raise TimeoutError(f"{got} requests stalled after {timeout} s, {count} were expected")

    def record(self):
        """Starts recording writes and flushes, in the order in which they arrive."""
        self._call("record")

    def log(self):
        """What was recorded: a list of [op, offset, length]."""
        return self._call("log")

    def crash_image(self, path, *, upto, without=()):
        """Writes the disk as a crash after ``upto`` recorded operations would leave it.

        ``without`` are indices of operations that never reached it (unflushed, reordered).
        """
        self._call("image", path=str(path), upto=upto, without=list(without))

    def close(self):
        """Releases all stalls and takes everything away."""
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            stack.callback(self._stop_server)
            if self._loop is not None:
                # the device lets go of its file only when its own I/O has ended
                stack.callback(self._loop.close)
            if self._server is not None and self._server.poll() is None:
                with contextlib.suppress(OSError, RuntimeError, ValueError):
                    self._call("drop")

    def _stop_server(self):
        if self._control is not None:
            self._lines.close() if hasattr(self, "_lines") else None
            self._control.close()
        if self._server is None:
            return
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stderr.close()
        deadline = time.monotonic() + 5
        while os.path.ismount(self._folder) and time.monotonic() < deadline:
            subprocess.run(["umount", "-l", self._folder], check=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
