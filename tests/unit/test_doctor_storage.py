# SPDX-License-Identifier: Apache-2.0
"""kvio.diagnose: the checks of devices and paths."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvio import diagnose, uring
from kvio.devices import OFF, Namespace, Queue, Verdict
from kvio.devices import Path as Way
from kvio.diagnose import Finding, Host, Severity, _storage


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(capabilities=uring.capabilities(limit_bytes=1 << 20), root=tmp_path)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def only(findings: object) -> Finding:
    (finding,) = list(findings)  # type: ignore[call-overload]
    assert isinstance(finding, Finding)
    return finding


def by_id(findings: object) -> dict[str, Finding]:
    return {finding.id: finding for finding in findings}  # type: ignore[attr-defined]


# --- devices ---


def way(**changes: object) -> Way:
    plain = Way(
        controller="nvme0", leg=None, transport="tcp", address="traddr=192.0.2.1", state="live",
        ana_state="optimized", numa_node=0, queue_count=8, fast_io_fail_tmo=5, ctrl_loss_tmo=60,
        reconnect_delay=10,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def namespace(*, queue: dict[str, object] | None = None, **changes: object) -> Namespace:
    settings = Queue(
        nr_requests=1023, max_sectors_kb=1280, max_hw_sectors_kb=2048, max_segments=127,
        scheduler="none", schedulers=("none", "mq-deadline"), write_cache="write through",
        io_poll=True, discard_max_bytes=0, zoned="none",
    )  # fmt: skip
    plain = Namespace(
        name="nvme0n1", disk="nvme0n1", path="/dev/nvme0n1", kind="nvme", char_path=None,
        size_bytes=1 << 40, logical_block=4096, physical_block=4096, read_only=False,
        rotational=False, model="m", serial="s", firmware="f", nqn="n", transport="tcp", nsid=1,
        nguid=None, eui=None, uuid=None, wwid=None, iopolicy="queue-depth", numa_node=0,
        queue=replace(settings, **(queue or {})),  # type: ignore[arg-type]
        paths=(way(),), holders=(), partitions=(), backing_file=None, verdict=Verdict(True),
        warnings=(),
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_device_that_is_set_up_well_has_only_good_findings(host: Host) -> None:
    two = namespace(paths=(way(), way(controller="nvme1")))
    found = by_id(diagnose.check_device(host, two, given=True))
    assert {f.severity for f in found.values()} == {Severity.OK}
    assert set(found) == {
        "scheduler:/dev/nvme0n1", "write_cache:/dev/nvme0n1", "poll:/dev/nvme0n1",
        "nvmeof.timeouts:nvme0", "nvmeof.timeouts:nvme1", "iopolicy:/dev/nvme0n1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "key", "severity", "remedy"),
    [
        (namespace(queue={"scheduler": "mq-deadline"}), "scheduler:/dev/nvme0n1", "warn",
         "echo none > /sys/class/block/nvme0n1/queue/scheduler"),
        (namespace(queue={"nr_requests": 63}), "nr_requests:/dev/nvme0n1", "warn",
         "echo 1023 > /sys/class/block/nvme0n1/queue/nr_requests"),
        (namespace(queue={"write_cache": "write back"}), "write_cache:/dev/nvme0n1", "info", ""),
        (namespace(queue={"io_poll": False}), "poll:/dev/nvme0n1", "info", "--nr-poll-queues="),
        (namespace(queue={"io_poll": False}, transport="pcie", paths=(way(transport="pcie"),)),
         "poll:/dev/nvme0n1", "info", "options nvme poll_queues="),
        (namespace(rotational=True), "rotational:/dev/nvme0n1", "info", ""),
        (namespace(paths=(way(fast_io_fail_tmo=OFF, ctrl_loss_tmo=600),)),
         "nvmeof.timeouts:nvme0", "warn", "echo 5 > /sys/class/nvme/nvme0/fast_io_fail_tmo"),
        (namespace(paths=(way(fast_io_fail_tmo=OFF, ctrl_loss_tmo=OFF),)),
         "nvmeof.timeouts:nvme0", "warn", "--ctrl-loss-tmo="),
        (namespace(paths=(way(fast_io_fail_tmo=OFF, ctrl_loss_tmo=30),)),
         "nvmeof.timeouts:nvme0", "info", "fast_io_fail_tmo"),
        (namespace(paths=(way(state="connecting"),)), "paths:/dev/nvme0n1", "fail", "nvme connect"),
        (namespace(paths=(way(), way(controller="nvme1", state="connecting"))),
         "paths:/dev/nvme0n1", "warn", "nvme list-subsys /dev/nvme0n1"),
        (namespace(iopolicy="numa", paths=(way(), way(controller="nvme1"))),
         "iopolicy:/dev/nvme0n1", "warn",
         "echo queue-depth > /sys/class/nvme-subsystem/nvme-subsys0/iopolicy"),
        (namespace(verdict=Verdict(False, ("signature",), ("ext4 at 1080",), overridable=True)),
         "write:/dev/nvme0n1", "info", "--allow-destroy"),
        (namespace(verdict=Verdict(False, ("mounted",), ("on /",))),
         "write:/dev/nvme0n1", "info", "take another device"),
    ],
)  # fmt: skip
def test_device_setting_has_its_finding_and_remedy(
    host: Host, device: Namespace, key: str, severity: str, remedy: str
) -> None:
    finding = by_id(diagnose.check_device(host, device, given=True))[key]
    assert finding.severity == severity
    assert remedy in finding.remedy
    assert "/dev/nvme0n1" in finding.title


def test_pcie_paths_have_no_fabric_timeouts(host: Host) -> None:
    device = namespace(paths=(way(transport="pcie", fast_io_fail_tmo=None, ctrl_loss_tmo=None),))
    assert not [
        key for key in by_id(diagnose.check_device(host, device, given=True)) if "tmo" in key
    ]
    assert not [
        key for key in by_id(_storage.check_device(host, device, given=True)) if "nvmeof" in key
    ]


def test_namespaces_are_found_below_the_root(host: Host) -> None:
    """Goal: discovery feeds the checks. Method: one PCIe namespace in a made-up sysfs."""
    assert only(_storage.check_namespaces(host)).title == "no NVMe namespaces"
    controller = "sys/devices/pci0000:00/nvme/nvme0"
    write(
        host.root,
        {
            f"{controller}/transport": "pcie",
            f"{controller}/state": "live",
            f"{controller}/nvme0n1/size": "2048",
            f"{controller}/nvme0n1/queue/scheduler": "none [bfq]",
        },
    )
    (host.root / "sys/block").mkdir(parents=True)
    (host.root / "sys/block/nvme0n1").symlink_to(host.root / controller / "nvme0n1")
    (host.root / controller / "nvme0n1/device").symlink_to(host.root / controller)
    found = by_id(_storage.check_namespaces(host))
    assert found["scheduler:/dev/nvme0n1"].severity is Severity.WARN
    assert "bfq" in found["scheduler:/dev/nvme0n1"].title


# --- paths ---


def test_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = by_id(diagnose.check_path(str(tmp_path), given=True))
    assert f"direct:{tmp_path}" in found
    assert os.listdir(tmp_path) == []


def test_path_without_direct_io_fails_only_when_it_was_named() -> None:
    """Goal: a refused O_DIRECT. Method: procfs, which has none, names its type."""
    given = by_id(diagnose.check_path("/proc/cpuinfo", given=True))["direct:/proc/cpuinfo"]
    assert given.severity is Severity.FAIL
    assert "file system: proc" in given.detail
    assert "ext4 or XFS" in given.remedy
    found = by_id(diagnose.check_path("/proc/cpuinfo", given=False))["direct:/proc/cpuinfo"]
    assert found.severity is Severity.INFO


def test_punted_reads_are_reported_where_nowait_is_refused() -> None:
    """Goal: RWF_NOWAIT decides. Method: procfs refuses it; asked directly here as well."""
    fd = os.open("/proc/cpuinfo", os.O_RDONLY)
    with pytest.raises(OSError, match="not supported") as caught:
        os.preadv(fd, [bytearray(16)], 0, os.RWF_NOWAIT)
    os.close(fd)
    assert caught.value.errno == errno.EOPNOTSUPP
    finding = by_id(diagnose.check_path("/proc/cpuinfo", given=True))["punt:/proc/cpuinfo"]
    assert (finding.severity, "engine" in finding.remedy) == (Severity.INFO, True)


def test_path_that_cannot_be_tried_says_why(tmp_path: Path) -> None:
    finding = only(diagnose.check_path(str(tmp_path / "none"), given=True))
    assert (finding.severity, "No such file" in finding.title) == (Severity.FAIL, True)
    (tmp_path / "empty").touch()
    finding = only(diagnose.check_path(str(tmp_path / "empty"), given=True))
    assert (finding.severity, "it is empty" in finding.title) == (Severity.FAIL, True)
    assert finding.remedy
