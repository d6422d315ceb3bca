"""What is known of a block device: values only, no reading. Public through `kvio.devices`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["OFF", "Namespace", "Path", "Queue", "Verdict"]

OFF = -1
"""Value of a timeout that is switched off: the kernel waits for ever."""


@dataclass(frozen=True)
class Verdict:
    """Would kvio write there?

    Attributes
    ----------
    writable
        True: `mode="rw"` is accepted. False: it is refused. None: it could not be found out.
    reasons
        Words: mounted, partition-mounted, held, partitioned, signature, hidden-path, read-only,
        unreadable, backing-file.
    details
        One line a fact, naming what was found and where.
    overridable
        `allow_destroy=True` would override every reason.
    """

    writable: bool | None
    reasons: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    overridable: bool = False


@dataclass(frozen=True)
class Queue:
    """Limits and settings of the block layer queue; None where the kernel does not say."""

    nr_requests: int | None
    max_sectors_kb: int | None
    max_hw_sectors_kb: int | None
    max_segments: int | None
    scheduler: str | None
    schedulers: tuple[str, ...]
    write_cache: str | None  # "write back" (volatile) or "write through"
    io_poll: bool | None
    discard_max_bytes: int | None
    zoned: str | None


@dataclass(frozen=True)
class Path:
    """One way to a namespace: a controller, and the leg through it when there are several.

    Timeouts are in seconds; `OFF` = switched off, None = the transport has none (PCIe).
    """

    controller: str
    leg: str | None  # hidden block device of this path, "nvme0c1n1"
    transport: str | None  # pcie, tcp, rdma, fc, loop
    address: str | None
    state: str | None  # live, connecting, resetting, deleting, dead, ...
    ana_state: str | None  # optimized, non-optimized, inaccessible, ...
    numa_node: int | None
    queue_count: int | None
    fast_io_fail_tmo: int | None
    ctrl_loss_tmo: int | None
    reconnect_delay: int | None

    @property
    def usable(self) -> bool:
        """I/O can go this way now."""
        blocked = ("inaccessible", "persistent-loss", "change")
        return self.state in (None, "live") and self.ana_state not in blocked


@dataclass(frozen=True)
class Namespace:
    """An NVMe namespace, another block device, or a partition of one."""

    name: str
    disk: str  # the whole disk; equals name unless this is a partition
    path: str
    kind: str  # nvme, loop, zram, virtio, scsi, device-mapper, md, ...
    char_path: str | None  # /dev/ng0n1: for engine="io_uring_cmd"
    size_bytes: int
    logical_block: int | None
    physical_block: int | None
    read_only: bool
    rotational: bool | None
    model: str | None
    serial: str | None
    firmware: str | None
    nqn: str | None
    transport: str | None
    nsid: int | None
    nguid: str | None
    eui: str | None
    uuid: str | None
    wwid: str | None
    iopolicy: str | None
    numa_node: int | None
    queue: Queue
    paths: tuple[Path, ...]
    holders: tuple[str, ...]
    partitions: tuple[str, ...]
    backing_file: str | None
    verdict: Verdict
    warnings: tuple[str, ...]

    @property
    def identity(self) -> str | None:
        """NGUID, EUI-64 or UUID: the same through whatever path and under whatever name."""
        return self.nguid or self.eui or self.uuid

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers: ready for JSON."""
        return {**asdict(self), "identity": self.identity}
