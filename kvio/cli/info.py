"""``kvio info``: the block devices and NVMe namespaces of this machine, and a verdict on each."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvio.cli.common import EXIT_OK, BenchError, format_bytes, table

if TYPE_CHECKING:
    from kvio.devices import Namespace, Path

_UNKNOWN = "-"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``info`` to the command line."""
    parser = subparsers.add_parser(
        "info",
        help="list devices, their paths and limits, and whether kvio would write to them",
        description="List block devices and NVMe namespaces; with names, describe these in full.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "devices", nargs="*", metavar="device", help="for example /dev/nvme1n1; default all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-verdict",
        action="store_true",
        help="open nothing: do not look for data on the devices",
    )
    parser.add_argument("--root", default="/", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print what was found. Returns the exit code."""
    found = find(args.devices, root=args.root, verdicts=not args.no_verdict)
    if args.json:
        print(json.dumps({"devices": [device.to_dict() for device in found]}, indent=2))
    elif args.devices:
        print("\n\n".join(describe(device) for device in found))
    else:
        print(overview(found))
    return EXIT_OK


def find(names: Sequence[str], *, root: str, verdicts: bool) -> list[Namespace]:
    """The devices with these names, or all of them.

    Raises
    ------
    BenchError
        A name is no device.
    """
    from kvio import devices  # noqa: PLC0415 - not needed for --help

    if not names:
        return list(devices.discover(root, verdicts=verdicts))
    found = []
    for name in names:
        try:
            found.append(devices.describe(name, root, verdict=verdicts))
        except OSError as error:
            raise BenchError(f"{name}: {error.strerror or error}") from None
        except ValueError as error:
            raise BenchError(str(error) if name in str(error) else f"{name}: {error}") from None
    return found


def verdict_word(device: Namespace) -> str:
    """Whether kvio would write there, in a few words."""
    verdict = device.verdict
    if verdict.writable is None:
        return f"unknown ({', '.join(verdict.reasons)})" if verdict.reasons else "not looked at"
    if verdict.writable:
        return "yes"
    return f"no: {', '.join(verdict.reasons)}"


def overview(found: Sequence[Namespace]) -> str:
    """One line a device, then the warnings."""
    if not found:
        return "no block devices"
    rows = [
        (
            device.path,
            format_bytes(device.size_bytes),
            device.model or device.kind,
            _transport(device),
            _paths(device.paths),
            _blocks(device),
            device.queue.scheduler or _UNKNOWN,
            _UNKNOWN if device.numa_node is None else str(device.numa_node),
            verdict_word(device),
        )
        for device in found
    ]
    header = (
        "device",
        "size",
        "model",
        "transport",
        "paths",
        "block",
        "scheduler",
        "numa",
        "kvio would write",
    )
    text = table(rows, header=header, right="lrlllrllll")
    warnings = [f"  {device.path}: {warning}" for device in found for warning in device.warnings]
    return text + ("\n\nwarnings\n" + "\n".join(warnings) if warnings else "")


def describe(device: Namespace) -> str:
    """Everything about one device, one fact a line; what is not known is left out."""
    queue = device.queue
    facts = [
        ("kind", device.kind),
        ("size", f"{format_bytes(device.size_bytes)} ({device.size_bytes} bytes)"),
        ("model", device.model),
        ("serial", device.serial),
        ("firmware", device.firmware),
        ("subsystem", device.nqn),
        ("identity", device.identity),
        ("character device", device.char_path),
        ("blocks", f"{_blocks(device)} (logical/physical)"),
        ("write cache", queue.write_cache),
        ("read only", "yes" if device.read_only else None),
        ("backing file", device.backing_file),
        ("queue", _queue(device)),
        (
            "polling",
            None if queue.io_poll is None else "poll queues" if queue.io_poll else "no poll queues",
        ),
        ("NUMA node", device.numa_node),
        ("I/O policy", device.iopolicy),
        ("partitions", ", ".join(device.partitions)),
        ("held by", ", ".join(device.holders)),
    ]
    shown = [(name, str(value)) for name, value in facts if value not in (None, "")]
    shown += [(f"path {path.controller}", _path(path)) for path in device.paths]
    shown += [("kvio would write", verdict_word(device))]
    shown += [("", detail) for detail in device.verdict.details]
    if device.verdict.reasons and device.verdict.writable is False:
        shown.append(
            (
                "",
                "--allow-destroy overrides this"
                if device.verdict.overridable
                else "nothing overrides this",
            )
        )
    shown += [("warning", warning) for warning in device.warnings]
    width = max(len(name) for name, _ in shown)
    return device.path + "\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in shown)


def _transport(device: Namespace) -> str:
    if device.transport:
        return device.transport
    found = sorted({path.transport for path in device.paths if path.transport})
    return "+".join(found) or _UNKNOWN


def _paths(paths: Sequence[Path]) -> str:
    """'2/2' paths usable; a dash for devices without paths."""
    return f"{sum(path.usable for path in paths)}/{len(paths)}" if paths else _UNKNOWN


def _blocks(device: Namespace) -> str:
    return f"{device.logical_block or '?'}/{device.physical_block or '?'}"


def _queue(device: Namespace) -> str:
    queue = device.queue
    parts = [
        f"scheduler {queue.scheduler}" if queue.scheduler else "",
        f"{queue.nr_requests} requests" if queue.nr_requests is not None else "",
        f"largest I/O {queue.max_sectors_kb} KiB (hardware {queue.max_hw_sectors_kb} KiB)"
        if queue.max_sectors_kb is not None
        else "",
        "zoned" if queue.zoned not in (None, "none") else "",
    ]
    return ", ".join(part for part in parts if part)


def _path(path: Path) -> str:
    def timeout(name: str, value: int | None) -> str:
        return "" if value is None else f"{name} {'off' if value < 0 else f'{value} s'}"

    parts = [
        path.transport or "",
        path.address or "",
        path.state or "",
        path.ana_state or "",
        f"{path.queue_count} queues" if path.queue_count is not None else "",
        timeout("fast_io_fail_tmo", path.fast_io_fail_tmo),
        timeout("ctrl_loss_tmo", path.ctrl_loss_tmo),
        timeout("reconnect_delay", path.reconnect_delay),
    ]
    return ", ".join(part for part in parts if part)
