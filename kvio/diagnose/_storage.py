# SPDX-License-Identifier: Apache-2.0
"""Checks of the paths and devices that are to be members."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from kvio import uring
from kvio.diagnose._finding import Finding, Host, Severity

if TYPE_CHECKING:
    from kvio.devices import Namespace, Path

_MIN_REQUESTS = 64
_LONG_LOSS_S = 600
_TRY_BYTES = 64 << 10


# --- paths: what reads of them do ---


def check_path(path: str, *, given: bool) -> Iterator[Finding]:
    """O_DIRECT, and whether the kernel starts reads without a worker thread.

    Parameters
    ----------
    path
        A regular file or block device, which is read; or a directory, in which a file of 64 KiB
        is made for the moment.
    given
        The user named it: then it matters more.
    """
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            with tempfile.NamedTemporaryFile(dir=path, prefix=".kvio-doctor-") as file:
                file.write(b"\0" * _TRY_BYTES)
                file.flush()
                os.fsync(file.fileno())
                found = uring.path_capabilities(file.name)
        else:
            found = uring.path_capabilities(path)
    except OSError as error:
        yield Finding(
            f"read:{path}",
            Severity.FAIL if given else Severity.INFO,
            f"{path} cannot be tried: {error.strerror or error}",
            remedy=_open_remedy(error, path),
        )
        return
    yield _direct_finding(path, found, given=given)
    yield from _punt_finding(path, found)


def _open_remedy(error: OSError, path: str) -> str:
    if error.errno in (errno.EACCES, errno.EPERM) and os.geteuid() == 0:
        return f"a device control group or a flag of the file refuses root; docker: --device={path}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"run as root, or let your user read it: setfacl -m u:$USER:rw {path}"
    if error.errno == errno.ENODATA:
        return "fill it, or give it a size: kvio.Volume.create() makes a file that is ready"
    if error.errno == errno.ENOENT:
        return "check the name: kvio info lists the devices"
    return ""


def _direct_finding(path: str, found: uring.PathCapabilities, *, given: bool) -> Finding:
    if found.direct:
        return Finding(f"direct:{path}", Severity.OK, f"{path} takes O_DIRECT")
    return Finding(
        f"direct:{path}",
        Severity.FAIL if given else Severity.INFO,
        f"{path} refuses O_DIRECT: {found.direct.detail}",
        f"file system: {file_system(path)}; every byte would go through the page cache",
        "use a block device, or a file on ext4 or XFS; or open with direct='prefer'",
    )


def _punt_finding(path: str, found: uring.PathCapabilities) -> Iterator[Finding]:
    if found.punted:
        yield Finding(
            f"punt:{path}",
            Severity.INFO,
            f"the kernel hands io_uring reads of {path} to worker threads (RWF_NOWAIT is refused)",
            "plain preadv threads are faster there, and engine='auto' takes them",
            "leave engine at 'auto', or --engine=threads",
        )
    elif found.nowait:
        yield Finding(f"punt:{path}", Severity.OK, f"{path} is read without worker threads")


def file_system(path: str, mounts: str = "/proc/self/mountinfo") -> str:
    """The type of the file system that holds a path, from the mount table."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = FilePath(mounts).read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [number]:
            return right.split()[0]
    return "unknown"


# --- devices: how they are set up ---


def check_device(host: Host, device: Namespace, *, given: bool) -> Iterator[Finding]:
    """The settings of one device's queue and, for NVMe, of its paths."""
    yield from _queue_findings(device)
    yield from _cache_findings(device)
    yield from _poll_findings(device)
    yield from _path_findings(device)
    yield from _policy_findings(device)
    if given and device.verdict.writable is False:
        yield _verdict_finding(device)


def _verdict_finding(device: Namespace) -> Finding:
    verdict = device.verdict
    remedy = "take another device: this one is in use"
    if "unreadable" in verdict.reasons:
        remedy = "make it readable, so that kvio can see what is on it"
    elif verdict.overridable:
        remedy = "--allow-destroy, when what is there may go"
    return Finding(
        f"write:{device.path}",
        Severity.INFO,
        f"kvio would not write to {device.path}: {', '.join(verdict.reasons)}",
        "; ".join(verdict.details),
        remedy,
    )


def _queue_findings(device: Namespace) -> Iterator[Finding]:
    queue = device.queue
    folder = f"/sys/class/block/{device.disk}/queue"
    if queue.scheduler not in (None, "none"):
        yield Finding(
            f"scheduler:{device.path}",
            Severity.WARN,
            f"{device.path} has the I/O scheduler {queue.scheduler}",
            "it costs CPU on every I/O, and kvio orders and limits its I/O itself",
            f"echo none > {folder}/scheduler",
        )
    elif queue.scheduler:
        yield Finding(
            f"scheduler:{device.path}", Severity.OK, f"{device.path} has no I/O scheduler"
        )
    if queue.nr_requests is not None and queue.nr_requests < _MIN_REQUESTS:
        yield Finding(
            f"nr_requests:{device.path}",
            Severity.WARN,
            f"{device.path} takes {queue.nr_requests} requests at a time (nr_requests)",
            "beyond that the submitting thread sleeps in the kernel",
            f"echo 1023 > {folder}/nr_requests, or a smaller queue_depth",
        )
    if device.rotational:
        yield Finding(
            f"rotational:{device.path}", Severity.INFO, f"{device.path} is a rotating disk",
            "random reads of pages are slow there",
        )  # fmt: skip


def _cache_findings(device: Namespace) -> Iterator[Finding]:
    if device.queue.write_cache == "write back":
        yield Finding(
            f"write_cache:{device.path}",
            Severity.INFO,
            f"{device.path} has a volatile write cache",
            "what was written is safe from a power failure only after vol.flush()",
        )
    elif device.queue.write_cache == "write through":
        yield Finding(
            f"write_cache:{device.path}", Severity.OK, f"{device.path} has no volatile write cache"
        )


def _poll_findings(device: Namespace) -> Iterator[Finding]:
    if device.kind != "nvme" or device.queue.io_poll is None:
        return
    if device.queue.io_poll:
        yield Finding(f"poll:{device.path}", Severity.OK, f"{device.path} has poll queues")
        return
    fabrics = device.transport in ("tcp", "rdma")
    yield Finding(
        f"poll:{device.path}",
        Severity.INFO,
        f"{device.path} has no poll queues, so iopoll=True is refused",
        remedy="nvme connect ... --nr-poll-queues=4"
        if fabrics
        else "echo 'options nvme poll_queues=4' > /etc/modprobe.d/kvio.conf, and reboot",
    )


def _path_findings(device: Namespace) -> Iterator[Finding]:
    if device.paths and not any(path.usable for path in device.paths):
        yield Finding(
            f"paths:{device.path}",
            Severity.FAIL,
            f"{device.path} has no usable path: I/O hangs until one comes back",
            "; ".join(_state(path) for path in device.paths),
            "nvme list-subsys; nvme connect ... the missing path",
        )
    else:
        for path in device.paths:
            if not path.usable or path.ana_state == "non-optimized":
                yield Finding(
                    f"paths:{device.path}",
                    Severity.WARN,
                    f"{device.path}: path {_state(path)}",
                    remedy=f"nvme list-subsys {device.path}",
                )
    for path in device.paths:
        yield from _timeout_findings(device, path)


def _state(path: Path) -> str:
    words = [path.controller, path.transport, path.address, "is", path.state, path.ana_state]
    return " ".join(word for word in words if word)


def _timeout_findings(device: Namespace, path: Path) -> Iterator[Finding]:
    """An I/O into a dead path waits for fast_io_fail_tmo, and without it for ctrl_loss_tmo."""
    if path.transport not in ("tcp", "rdma", "fc"):
        return
    from kvio.devices import OFF  # noqa: PLC0415 - as in devices_of()

    fast, loss = path.fast_io_fail_tmo, path.ctrl_loss_tmo
    name = f"{device.path} via {path.controller}"
    folder = f"/sys/class/nvme/{path.controller}"
    if fast not in (None, OFF):
        yield Finding(
            f"nvmeof.timeouts:{path.controller}",
            Severity.OK,
            f"{name}: I/O into a dead path fails after {fast} s (fast_io_fail_tmo)",
        )
        return
    endless = loss in (None, OFF)
    wait = "for ever" if endless else f"for {loss} s (ctrl_loss_tmo)"
    grave = endless or (loss is not None and loss >= _LONG_LOSS_S)
    yield Finding(
        f"nvmeof.timeouts:{path.controller}",
        Severity.WARN if grave else Severity.INFO,
        f"{name}: fast_io_fail_tmo is off, so I/O into a dead path hangs {wait}",
        "kvio's own deadlines answer the caller in time, but the buffers stay with the kernel",
        f"echo 5 > {folder}/fast_io_fail_tmo; when connecting: nvme connect ... "
        f"--fast_io_fail_tmo=5 --ctrl-loss-tmo=60",
    )


def _policy_findings(device: Namespace) -> Iterator[Finding]:
    if len(device.paths) < 2 or not device.iopolicy:
        return
    if device.iopolicy == "queue-depth":
        yield Finding(
            f"iopolicy:{device.path}", Severity.OK, f"{device.path}: I/O policy queue-depth"
        )
        return
    subsystem = device.disk.removeprefix("nvme").partition("n")[0]
    yield Finding(
        f"iopolicy:{device.path}",
        Severity.WARN,
        f"{device.path}: I/O policy {device.iopolicy} over {len(device.paths)} paths",
        "numa uses one path at a time" if device.iopolicy == "numa" else "it ignores slow paths",
        f"echo queue-depth > /sys/class/nvme-subsystem/nvme-subsys{subsystem}/iopolicy "
        "(Linux 6.11; before that round-robin)",
    )


def devices_of(host: Host, path: str) -> Namespace | None:
    """What sysfs says of a block or NVMe character device; None for anything else."""
    # discovery is needed only here, and the verdict in it needs the compiled engine
    from kvio import devices  # noqa: PLC0415

    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISBLK(mode) and not stat.S_ISCHR(mode):
            return None
        return devices.describe(path, host.root, verdict=not host.core_error)
    except (OSError, ValueError):
        return None


def check_namespaces(host: Host) -> Iterator[Finding]:
    """Every NVMe namespace of the machine, when no device was named."""
    from kvio import devices  # noqa: PLC0415

    found = [d for d in devices.discover(host.root, verdicts=False) if d.kind == "nvme"]
    if not found:
        yield Finding(
            "devices",
            Severity.INFO,
            "no NVMe namespaces",
            "files and other block devices can be members, too",
        )
    for device in found:
        yield from check_device(host, device, given=False)


def check_member(host: Host, path: str) -> Iterator[Finding]:
    """One path that the user named: its settings where it is a device, then real reads."""
    device = devices_of(host, path)
    if device is not None:
        yield from check_device(host, device, given=True)
        if device.paths and not any(way.usable for way in device.paths):
            return  # a read would hang
    try:
        if stat.S_ISCHR(os.stat(path).st_mode) and device is not None:
            return  # commands go there, not reads
    except OSError:
        pass
    yield from check_path(path, given=True)
