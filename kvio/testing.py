"""Block devices in memory, and devices of a fixed speed: for tests, demonstrations and benches.

A machine without spare NVMe namespaces still shows how striping behaves: loop devices with direct
I/O over memory take the kernel's real asynchronous block path, and a bandwidth cap makes each of
them behave like a namespace of that speed. Both need root.

    with LoopDevices(4, size_bytes=1 << 30) as loops, throttle(loops.paths, read_bps=250 << 20):
        vol = kvio.Volume.open(loops.paths)
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

__all__ = ["LoopDevice", "LoopDevices", "throttle"]

# linux/loop.h
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CLR_FD = 0x4C01
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_READ_ONLY = 1
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16
_LOOP_CONFIG = struct.Struct("=II QQQQQ IIII 64s64s32s 2Q 8Q")

_DETACH_SECONDS = 10.0


def _configure(loop_fd: int, file_fd: int, sector: int, flags: int) -> None:
    config = _LOOP_CONFIG.pack(
        file_fd, sector, 0, 0, 0, 0, 0, 0, 0, 0, flags, b"kvio", b"", b"", *([0] * 10)
    )
    fcntl.ioctl(loop_fd, _LOOP_CONFIGURE, config)


def _open_free_loop() -> tuple[str, int]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    finally:
        os.close(control)
    path = f"/dev/loop{number}"
    return path, os.open(path, os.O_RDWR | os.O_CLOEXEC)


class LoopDevice:
    """One loop device over a file; a context manager that detaches it.

    The kernel detaches the device by itself when its last opener is gone, and this object is one
    of them: a killed process leaves no loop device behind.

    Parameters
    ----------
    backing
        Path of the file under it, or a descriptor (``/proc/self/fd`` is used to open it anew).
    sector
        Logical block size of the device in bytes: 512 or 4096.
    direct
        Read and write the file with O_DIRECT. Where the file's file system cannot do that (tmpfs
        before Linux 6.6), the device is buffered instead and :attr:`direct` says so.
    read_only
        Make a read-only block device.

    Raises
    ------
    PermissionError
        Without root.
    OSError
        When the kernel has no loop driver, or the file is smaller than a sector.
    """

    path: str
    direct: bool

    def __init__(
        self,
        backing: str | os.PathLike[str] | int,
        *,
        sector: int = 512,
        direct: bool = True,
        read_only: bool = False,
    ) -> None:
        if sector not in (512, 1024, 2048, 4096):
            raise ValueError(f"sector is {sector}; a loop device has 512, 1024, 2048 or 4096")
        self.backing = f"/proc/self/fd/{backing}" if isinstance(backing, int) else str(backing)
        self._fd = -1
        flags = _LO_FLAGS_AUTOCLEAR | (_LO_FLAGS_READ_ONLY if read_only else 0)
        access = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        try:
            self._attach(sector, flags | (_LO_FLAGS_DIRECT_IO if direct else 0), access)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._attach(sector, flags, access)
        self.direct = self._sysfs("dio") == "1"

    def _attach(self, sector: int, flags: int, access: int) -> None:
        direct = os.O_DIRECT if flags & _LO_FLAGS_DIRECT_IO else 0
        file_fd = os.open(self.backing, access | direct)
        try:
            for _ in range(64):  # another process may take the free device first
                self.path, self._fd = _open_free_loop()
                try:
                    _configure(self._fd, file_fd, sector, flags)
                    return
                except OSError as error:
                    os.close(self._fd)
                    self._fd = -1
                    if error.errno != errno.EBUSY:
                        raise
            raise OSError(errno.EBUSY, "64 free loop devices were taken by others", self.path)
        finally:
            os.close(file_fd)

    def _sysfs(self, name: str) -> str:
        try:
            return Path("/sys/block", Path(self.path).name, "loop", name).read_text().strip()
        except OSError:  # not attached, or detached while it was read
            return ""

    @property
    def attached(self) -> bool:
        """Whether the kernel still has the file under the device."""
        return bool(self._sysfs("backing_file"))

    def close(self) -> None:
        """Detaches the device and waits for that; warns, with their pids, when others hold it."""
        if self._fd < 0:
            return
        try:
            fcntl.ioctl(self._fd, _LOOP_CLR_FD)
        except OSError as error:
            if error.errno != errno.ENXIO:  # somebody ran losetup -d
                raise
        finally:
            os.close(self._fd)
            self._fd = -1
        deadline = time.monotonic() + _DETACH_SECONDS
        pause = 0.001
        while self.attached:
            if time.monotonic() > deadline:
                holders = ", ".join(_openers(self.path)) or "the kernel (mounted, or I/O in flight)"
                warnings.warn(
                    f"{self.path} stays attached until it is closed by {holders}",
                    ResourceWarning,
                    stacklevel=2,
                )
                return
            time.sleep(pause)
            pause = min(pause * 2, 0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)

    def __repr__(self) -> str:
        return f"<LoopDevice {self.path} over {self.backing}>"


def _openers(device: str) -> Iterator[str]:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == device:
                yield f"pid {link.parts[2]}"
        except OSError:
            continue


class LoopDevices:
    """N loop devices of equal size over memory, with direct I/O; a context manager.

    The memory is allocated at once (a benchmark must not measure page faults) and freed with the
    devices, also when the process is killed: it has no name in any file system.

    Parameters
    ----------
    n
        How many.
    size_bytes
        Of each; a multiple of ``sector``.
    sector
        Logical block size in bytes: 512 or 4096.

    Attributes
    ----------
    paths : list of str
        The block devices.
    backing : list of str
        Files through which the same bytes can be read and written behind the devices' back.
    direct : bool
        Whether all of them read the memory with O_DIRECT (Linux 6.6 and later).
    """

    def __init__(self, n: int, size_bytes: int, sector: int = 512) -> None:
        if n < 1 or size_bytes < sector or size_bytes % sector:
            raise ValueError(
                f"{n} devices of {size_bytes} bytes: need at least 1, each a multiple of {sector}"
            )
        self._files: list[int] = []
        self.devices: list[LoopDevice] = []
        try:
            for index in range(n):
                self._files.append(_memory_file(f"kvio-{index}", size_bytes))
                self.devices.append(LoopDevice(self._files[-1], sector=sector))
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[str]:
        return [device.path for device in self.devices]

    @property
    def backing(self) -> list[str]:
        return [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._files]

    @property
    def direct(self) -> bool:
        return all(device.direct for device in self.devices)

    def close(self) -> None:
        with ExitStack() as stack:
            for fd in self._files:
                stack.callback(os.close, fd)
            for device in self.devices:
                stack.callback(device.close)
            self._files, self.devices = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory_file(name: str, size_bytes: int) -> int:
    fd = os.memfd_create(name)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        raise OSError(
            error.errno, f"no memory for a device of {size_bytes} bytes: {error.strerror}"
        ) from error
    return fd


# --- devices of a fixed speed ---

_GROUP_PREFIX = "kvio-throttle-"
_V1_KEYS = {
    "read_bps": "blkio.throttle.read_bps_device",
    "write_bps": "blkio.throttle.write_bps_device",
    "read_iops": "blkio.throttle.read_iops_device",
    "write_iops": "blkio.throttle.write_iops_device",
}
# in the order of throttle()'s parameters
_V2_KEYS = {"read_bps": "rbps", "write_bps": "wbps", "read_iops": "riops", "write_iops": "wiops"}


@contextmanager
def throttle(
    devices: Sequence[str],
    *,
    read_bps: int | None = None,
    write_bps: int | None = None,
    read_iops: int | None = None,
    write_iops: int | None = None,
    root: str = "/sys/fs/cgroup",
) -> Iterator[None]:
    """Caps each of the block devices for this process and those it starts meanwhile.

    The process moves into a control group of its own (blkio of cgroup v1, or io of v2) and back at
    the end. Blocks may be nested for other devices.

    The kernel charges a request that it has to split once more for the rest (seen with Linux 6.18):
    from buffers of 4 KiB pages a loop device takes 128 pages, so 1 MiB requests then run at half
    the cap. Use requests of at most 512 KiB, or buffers in huge pages.

    Parameters
    ----------
    devices
        Paths of whole block devices.
    read_bps, write_bps
        Bytes per second and device.
    read_iops, write_iops
        Requests per second and device.
    root
        Where the control groups are mounted; tests pass a folder.

    Raises
    ------
    PermissionError
        Without root.
    OSError
        ENOTSUP when the kernel has no throttling (CONFIG_BLK_DEV_THROTTLING) or it is not mounted.
    """
    limits = zip(_V2_KEYS, (read_bps, write_bps, read_iops, write_iops), strict=True)
    wanted = {name: value for name, value in limits if value is not None}
    if not wanted or any(value <= 0 for value in wanted.values()):
        raise ValueError("give at least one limit, each a positive number per second")
    numbers = [_device_number(path) for path in devices]
    group, home = _own_group(Path(root))
    nested = group == home
    try:
        if not nested:
            group.mkdir(exist_ok=True)
        for number in numbers:
            _set_limits(group, number, {name: str(value) for name, value in wanted.items()})
        if not nested:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        if nested:
            for number in numbers:
                _set_limits(group, number, dict.fromkeys(wanted))
        else:
            _leave(group, home)


def _device_number(path: str) -> str:
    status = os.stat(path)
    if not stat.S_ISBLK(status.st_mode):
        raise OSError(errno.ENOTBLK, "only a block device can be throttled", path)
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _own_group(root: Path) -> tuple[Path, Path]:
    """The group to make for this process, and the one it is in now (the same when nested)."""
    v1 = (root / "blkio" / _V1_KEYS["read_bps"]).exists()
    if not v1 and not (root / "cgroup.controllers").exists():
        raise OSError(
            errno.ENOTSUP, "neither cgroup v1 blkio throttling nor cgroup v2 is mounted", str(root)
        )
    top = root / "blkio" if v1 else root
    if not v1:
        if "io" not in (root / "cgroup.controllers").read_text().split():
            raise OSError(errno.ENOTSUP, "cgroup v2 offers no io controller here", str(root))
        if "io" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+io")
    home = top / _current_group(v1).lstrip("/")
    if home.name.startswith(_GROUP_PREFIX):
        return home, home
    return top / f"{_GROUP_PREFIX}{os.getpid()}", home


def _current_group(v1: bool) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("blkio" in controllers.split(",")) if v1 else (controllers == ""):
            return path
    return "/"


def _set_limits(group: Path, number: str, limits: dict[str, str] | dict[str, str | None]) -> None:
    """A limit of None lifts it."""
    if (group / "io.max").exists() or not (group / _V1_KEYS["read_bps"]).exists():
        words = [f"{_V2_KEYS[name]}={value or 'max'}" for name, value in limits.items()]
        (group / "io.max").write_text(f"{number} {' '.join(words)}")
        return
    for name, value in limits.items():
        (group / _V1_KEYS[name]).write_text(f"{number} {value or 0}")


def _leave(group: Path, home: Path) -> None:
    """Moves whoever is in the group back, then removes it; forked children may still be coming."""
    for _ in range(100):
        try:
            members = (group / "cgroup.procs").read_text().split()
            for pid in members:
                with ExitStack() as ignore_the_dead:
                    ignore_the_dead.push(lambda kind, *_: kind is ProcessLookupError)
                    (home / "cgroup.procs").write_text(pid)
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            time.sleep(0.02)
    print(f"kvio: could not remove the control group {group}", file=sys.stderr)
