"""What block devices and NVMe namespaces this machine has, and whether kvio would write to them.

Everything is read from sysfs at the moment of the call; nothing is opened except, for the verdict,
the device itself (`kvio._core.safety_verdict`, read-only). A namespace with several paths is ONE
entry, its multipath head; the hidden legs appear as its `paths`.

>>> import kvio.devices
>>> for device in kvio.devices.discover():
...     print(device.path, device.size_bytes, device.verdict.details)

Sources of the file names: Documentation/ABI/stable/sysfs-block and the NVMe host driver of Linux.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from kvio import _sysfs
from kvio._namespace import OFF, Namespace, Path, Queue, Verdict
from kvio._sysfs import Directory

__all__ = ["OFF", "Namespace", "Path", "Queue", "Verdict", "describe", "discover"]


_REASONS = {
    "mounted": 1 << 0,
    "partition-mounted": 1 << 1,
    "held": 1 << 2,
    "partitioned": 1 << 3,
    "signature": 1 << 4,
    "hidden-path": 1 << 5,
    "read-only": 1 << 6,
    "unreadable": 1 << 7,
    "backing-file": 1 << 8,
}
_NEVER = {"mounted", "partition-mounted", "held", "hidden-path", "read-only"}

_KINDS = (
    ("nvme", "nvme"),
    ("loop", "loop"),
    ("zram", "zram"),
    ("vd", "virtio"),
    ("sd", "scsi"),
    ("dm-", "device-mapper"),
    ("md", "md"),
    ("ublk", "ublk"),
    ("nbd", "nbd"),
    ("pmem", "pmem"),
    ("xvd", "xen"),
    ("mmcblk", "mmc"),
)


# ---- reading -----------------------------------------------------------------------------------


def _kind(name: str) -> str:
    return next((kind for prefix, kind in _KINDS if name.startswith(prefix)), "other")


def _queue(disk: Directory) -> Queue:
    queue = disk / "queue"
    words = (queue.text("scheduler") or "").split()
    poll = queue.number("io_poll")
    return Queue(
        nr_requests=queue.number("nr_requests"),
        max_sectors_kb=queue.number("max_sectors_kb"),
        max_hw_sectors_kb=queue.number("max_hw_sectors_kb"),
        max_segments=queue.number("max_segments"),
        scheduler=next((w.strip("[]") for w in words if w.startswith("[")), None)
        or (words[0] if len(words) == 1 else None),
        schedulers=tuple(w.strip("[]") for w in words),
        write_cache=queue.text("write_cache"),
        io_poll=None if poll is None else bool(poll),
        discard_max_bytes=queue.number("discard_max_bytes"),
        zoned=queue.text("zoned"),
    )


def _node(number: int | None) -> int | None:
    """-1 is how the kernel says "no node"."""
    return None if number is None or number < 0 else number


def _timeout(controller: Directory, name: str) -> int | None:
    return OFF if controller.text(name) == "off" else controller.number(name)


def _path(controller: Directory, leg: Directory | None) -> Path:
    return Path(
        controller=controller.name,
        leg=leg.name if leg else None,
        transport=controller.text("transport"),
        address=controller.text("address"),
        state=controller.text("state"),
        ana_state=leg.text("ana_state") if leg else None,
        numa_node=_node(controller.number("numa_node")),
        queue_count=controller.number("queue_count"),
        fast_io_fail_tmo=_timeout(controller, "fast_io_fail_tmo"),
        ctrl_loss_tmo=_timeout(controller, "ctrl_loss_tmo"),
        reconnect_delay=_timeout(controller, "reconnect_delay"),
    )


def _controllers(root: FilePath) -> list[Directory]:
    return _sysfs.children(root / "sys/class/nvme", r"nvme\d+")


def _nvme_paths(root: FilePath, disk: Directory) -> tuple[tuple[Path, ...], Directory | None]:
    """The ways to a namespace, and its subsystem's directory when there is one."""
    numbers = re.fullmatch(r"nvme(\d+)n(\d+)", disk.name)
    above = disk.resolve("device")  # the controller; of a multipath head, the subsystem
    if numbers is None or above is None:
        return (), None
    controllers = _controllers(root)
    if above.name.startswith("nvme-subsys"):
        leg_name = re.compile(rf"nvme{numbers[1]}c\d+n{numbers[2]}")
        legs = [
            (controller, leg)
            for controller in controllers
            for leg in _sysfs.children(controller.path, leg_name.pattern)
        ]
        return tuple(_path(controller, leg) for controller, leg in legs), above
    subsystem = next(
        (
            sub
            for sub in _sysfs.children(root / "sys/class/nvme-subsystem", r"nvme-subsys\d+")
            if sub.exists(above.name)
        ),
        None,
    )
    return (_path(above, None),), subsystem


def _same(values: Iterable[Any]) -> Any:
    """The one value of all, or None when they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _read(root: FilePath, directory: Directory) -> Namespace:
    """One block device, without verdict and warnings."""
    name = directory.device_name()
    part = directory.exists("partition")
    disk = directory.parent() if part else directory
    kind = _kind(disk.name)
    paths, subsystem = _nvme_paths(root, disk) if kind == "nvme" else ((), None)
    about = subsystem or disk.resolve("device") or disk
    queue = disk / "queue"
    rotational = queue.number("rotational")
    generic = re.sub(r"^nvme", "ng", disk.name)
    numa = _same(p.numa_node for p in paths) if paths else disk.climb("numa_node")
    return Namespace(
        name=name,
        disk=disk.device_name(),
        path=f"/dev/{name}",
        kind=kind,
        char_path=f"/dev/{generic}"
        if kind == "nvme" and not part and (root / "sys/class/nvme-generic" / generic).exists()
        else None,
        size_bytes=(directory.number("size") or 0) * 512,
        logical_block=queue.number("logical_block_size"),
        physical_block=queue.number("physical_block_size"),
        read_only=bool(directory.number("ro")),
        rotational=None if rotational is None else bool(rotational),
        model=about.text("model") or disk.text("dm/name"),
        serial=about.text("serial") or disk.text("serial"),
        firmware=about.text("firmware_rev") or about.text("rev"),
        nqn=about.text("subsysnqn"),
        transport=_same(p.transport for p in paths) if paths else None,
        nsid=disk.number("nsid"),
        nguid=_sysfs.identifier(disk.text("nguid")),
        eui=_sysfs.identifier(disk.text("eui")),
        uuid=_sysfs.identifier(disk.text("uuid")),
        wwid=disk.text("wwid") or disk.text("device/wwid"),
        iopolicy=subsystem.text("iopolicy") if subsystem and len(paths) > 0 else None,
        numa_node=_node(numa),
        queue=_queue(disk),
        paths=paths,
        holders=tuple(c.name for c in _sysfs.children(directory.path / "holders", r".+")),
        partitions=()
        if part
        else tuple(c.name for c in _sysfs.children(directory.path, r".+") if c.exists("partition")),
        backing_file=disk.text("loop/backing_file"),
        verdict=Verdict(None),
        warnings=(),
    )


# ---- judging -----------------------------------------------------------------------------------


def _judge(root: FilePath, device: Namespace) -> Verdict:
    from kvio import _core  # noqa: PLC0415 - reading sysfs needs no compiled module

    if device.paths and not any(path.usable for path in device.paths):
        return Verdict(None, ("unreadable",), ("no usable path: a read would hang",))
    if device.queue.zoned == "host-managed":
        return Verdict(False, ("zoned",), ("zoned: it takes no writes at random offsets",))
    live = root == FilePath("/")
    node = device.path if live else f"{root}{device.path}"
    try:
        bits, text = _core.safety_verdict(node, root="" if live else str(root))
    except OSError as error:
        return Verdict(None, ("unreadable",), (f"cannot be looked at: {error.strerror}",))
    reasons = tuple(word for word, bit in _REASONS.items() if bits & bit)
    return Verdict(
        writable=not reasons,
        reasons=reasons,
        details=tuple(text.splitlines()),
        overridable=bool(reasons) and not _NEVER.intersection(reasons),
    )


def _path_warnings(device: Namespace) -> Iterable[str]:
    for path in device.paths:
        where = f"path {path.controller} ({path.transport} {path.address or ''})".replace(" )", ")")
        if path.state not in (None, "live"):
            yield f"{where} is {path.state}"
        if path.ana_state not in (None, "optimized"):
            yield f"{where} is {path.ana_state} (ANA)"
        if path.fast_io_fail_tmo == OFF and path.transport != "loop":
            loss = path.ctrl_loss_tmo
            wait = "for ever" if loss in (None, OFF) else f"for {loss} s"
            yield (
                f"{where}: fast_io_fail_tmo is off, so I/O into a dead path hangs {wait} "
                f"(ctrl_loss_tmo): use deadlines, and "
                f"echo 5 > /sys/class/nvme/{path.controller}/fast_io_fail_tmo"
            )
    if device.paths and not any(path.usable for path in device.paths):
        yield "no path is usable: I/O hangs until one comes back"


def _warnings(device: Namespace) -> tuple[str, ...]:
    found = list(_path_warnings(device))
    head = re.match(r"nvme(\d+)n", device.disk)
    if head and len(device.paths) > 1 and device.iopolicy in ("numa", "round-robin"):
        found.append(
            f"I/O policy {device.iopolicy} over {len(device.paths)} paths "
            + ("uses one path at a time" if device.iopolicy == "numa" else "ignores slow paths")
            + f": echo queue-depth > /sys/class/nvme-subsystem/nvme-subsys{head[1]}/iopolicy"
        )
    if device.queue.scheduler not in (None, "none"):
        found.append(
            f"I/O scheduler {device.queue.scheduler} costs CPU on every I/O: "
            f"echo none > /sys/class/block/{device.disk}/queue/scheduler"
        )
    if device.queue.zoned == "host-managed":
        found.append("zoned device: no writes at random offsets")
    return tuple(found)


def _twins(devices: list[Namespace]) -> list[Namespace]:
    """Says of each namespace under which other names it appears (native multipath is off)."""

    def with_note(device: Namespace) -> Namespace:
        others = [
            other.path
            for other in devices
            if other.name != device.name and device.identity and other.identity == device.identity
        ]
        if not others:
            return device
        note = f"the same namespace is also {', '.join(others)}: use one of them only"
        return replace(device, warnings=(*device.warnings, note))

    return [with_note(device) for device in devices]


# ---- the interface -----------------------------------------------------------------------------


def discover(
    root: str | os.PathLike[str] = "/", *, verdicts: bool = True, empty: bool = False
) -> tuple[Namespace, ...]:
    """All whole block devices, in the order of their names.

    Parameters
    ----------
    root
        Directory with `sys` and `proc` in it; "/" on a live system, a made-up tree in tests.
    verdicts
        Ask for each whether kvio would write there. This reads the first and last MiB of every
        device, and claims it for a moment.
    empty
        Include devices without a size: loop and zram devices that are not set up.
    """
    top = FilePath(root)
    found = []
    for directory in _sysfs.children(top / "sys/block", r".+"):
        if directory.number("hidden") or re.fullmatch(r"nvme\d+c\d+n\d+", directory.name):
            continue
        device = _read(top, directory)
        if device.size_bytes == 0 and not device.paths and not empty:
            continue
        device = replace(device, warnings=_warnings(device))
        found.append(replace(device, verdict=_judge(top, device)) if verdicts else device)
    return tuple(_twins(found))


def describe(
    path: str | os.PathLike[str], root: str | os.PathLike[str] = "/", *, verdict: bool = True
) -> Namespace:
    """One block device, partition or NVMe character device, by its path or its bare name.

    Raises
    ------
    FileNotFoundError
        There is no such path, or sysfs does not describe it.
    ValueError
        The path is not a block device and not an NVMe character device.
    """
    top = FilePath(root)
    name = os.fspath(path)
    if top == FilePath("/") and "/" in name:
        info = os.stat(name)
        if stat.S_ISBLK(info.st_mode):
            number = f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
            name = FilePath(os.path.realpath(f"/sys/dev/block/{number}")).name
        elif not stat.S_ISCHR(info.st_mode):
            raise ValueError(f"{name}: not a device")
    name = re.sub(r"^ng(?=\d+n\d+$)", "nvme", name.rsplit("/", 1)[-1])
    directory = Directory(top / "sys/class/block" / name)
    if not directory.exists("size"):
        if (top / "dev" / name).is_char_device():
            raise ValueError(f"{path}: not a block device and not an NVMe character device")
        raise FileNotFoundError(2, "sysfs describes no such block device", str(path))
    device = _read(top, directory)
    device = replace(device, warnings=_warnings(device))
    return replace(device, verdict=_judge(top, device)) if verdict else device
