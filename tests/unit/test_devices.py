"""`kvio.devices` tells what is there: namespaces, their paths, limits, dangers.

Method: made-up sysfs trees in the shape that Linux gives to NVMe over PCIe, TCP with native
multipath, RDMA, and to drives seen twice with multipath off; then this machine's own devices,
compared with what ioctls and lsblk say.
"""

from __future__ import annotations

import json
import os
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from kvio import _core, devices
from tests.unit.cdevice import loop_device, run, tool

MIB = 1 << 20
NGUID = "36434630-5223-0004-0000-5c0d29e61c8b"
ZERO_UUID = "00000000-0000-0000-0000-000000000000"


class Tree:
    """A made-up sysfs. Directories lie where Linux puts them; classes are links to them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.next_minor = 0
        for name in ("sys/block", "sys/class/block", "sys/class/nvme", "sys/class/nvme-subsystem"):
            (root / name).mkdir(parents=True)

    def files(self, directory: Path, **values: object) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (directory / name).write_text(f"{value}\n")
        return directory

    def link(self, where: str, target: Path) -> None:
        path = self.root / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))

    def block(self, parent: str, name: str, *, mib: int = 1024, **values: object) -> Path:
        directory = self.root / "sys/devices" / parent / name
        self.files(directory, size=mib * 2048, ro=0, hidden=values.pop("hidden", 0), **values)
        self.files(directory, dev=f"259:{self.next_minor}", uevent=f"MAJOR=259\nDEVNAME={name}")
        self.link(f"sys/dev/block/259:{self.next_minor}", directory)
        self.next_minor += 1
        (directory / "holders").mkdir()
        self.link(f"sys/block/{name}", directory)
        self.link(f"sys/class/block/{name}", directory)
        queue = {
            "nr_requests": 1023, "max_sectors_kb": 512, "max_hw_sectors_kb": 2048, "io_poll": 0,
            "max_segments": 127, "scheduler": "[none] mq-deadline kyber", "rotational": 0,
            "write_cache": "write through", "logical_block_size": 512, "zoned": "none",
            "physical_block_size": 4096, "discard_max_bytes": 2199023255040,
        }  # fmt: skip
        self.files(directory / "queue", **queue)
        return directory

    def controller(self, parent: str, name: str, **values: object) -> Path:
        directory = self.root / "sys/devices" / parent / name
        self.files(directory, state="live", numa_node=-1, queue_count=9)
        self.files(directory, **values)
        self.link(f"sys/class/nvme/{name}", directory)
        return directory

    def subsystem(self, name: str, *controllers: Path, **values: object) -> Path:
        directory = self.root / "sys/devices/virtual/nvme-subsystem" / name
        self.files(directory, **values)
        self.link(f"sys/class/nvme-subsystem/{name}", directory)
        for controller in controllers:
            (directory / controller.name).symlink_to(controller)
        return directory

    def discover(self) -> tuple[devices.Namespace, ...]:
        return devices.discover(self.root, verdicts=False)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def pcie(tree: Tree, number: int = 0, **namespace: object) -> Path:
    parent = f"pci0000:00/0000:00:1{number}.0/nvme"
    controller = tree.controller(
        parent, f"nvme{number}", model="FAST 9100", serial=f"S{number}", firmware_rev="1.0",
        transport="pcie", address=f"0000:00:1{number}.0", numa_node=1, subsysnqn="nqn.x:pcie",
    )  # fmt: skip
    directory = tree.block(f"{parent}/nvme{number}", f"nvme{number}n1", **namespace)
    (directory / "device").symlink_to(controller)
    return directory


def fabric(
    tree: Tree, *, transport: str = "tcp", states: tuple[tuple[str, str], ...], **policy: str
) -> Path:
    """One head over one path for each (state, ana_state)."""
    controllers = []
    for number, (state, ana) in enumerate(states):
        controller = tree.controller(
            "virtual/nvme-fabrics/ctl", f"nvme{number}", transport=transport, state=state,
            address=f"traddr=10.0.0.{number},trsvcid=4420", numa_node=number,
            fast_io_fail_tmo=policy.get("fast", "off"), ctrl_loss_tmo=policy.get("loss", "600"),
            reconnect_delay="10",
        )  # fmt: skip
        tree.block(
            f"virtual/nvme-fabrics/ctl/nvme{number}", f"nvme0c{number}n1", hidden=1, ana_state=ana
        )
        controllers.append(controller)
    subsystem = tree.subsystem(
        "nvme-subsys0", *controllers, subsysnqn="nqn.2024-01.org:array", model="Array",
        serial="A1", firmware_rev="7", iopolicy=policy.get("iopolicy", "round-robin"),
    )  # fmt: skip
    head = tree.block(
        "virtual/nvme-subsystem/nvme-subsys0", "nvme0n1", nguid=NGUID, nsid=1, wwid=f"eui.{NGUID}"
    )
    (head / "device").symlink_to(subsystem)
    return head


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths whose verdict was asked for; the answers are the real ones."""
    paths: list[str] = []
    real = _core.safety_verdict

    def safety_verdict(path: str, root: str = "") -> tuple[int, str]:
        paths.append(path)
        return real(path, root=root)

    monkeypatch.setattr(_core, "safety_verdict", safety_verdict)
    return paths


# ---- made-up trees -----------------------------------------------------------------------------


def test_pcie_drive_is_described_completely(tree: Tree) -> None:
    directory = pcie(tree, nsid=1, eui="0025385b11b2d1c7", uuid=ZERO_UUID, nguid=ZERO_UUID)
    tree.files(directory / "nvme0n1p1", partition=1, size=2048)
    tree.files(tree.root / "sys/class/nvme-generic/ng0n1")
    (directory / "holders/dm-0").mkdir()
    (device,) = tree.discover()
    assert (device.name, device.path, device.kind) == ("nvme0n1", "/dev/nvme0n1", "nvme")
    assert device.char_path == "/dev/ng0n1"
    assert (device.size_bytes, device.logical_block, device.physical_block) == (1 << 30, 512, 4096)
    assert (device.model, device.serial, device.firmware) == ("FAST 9100", "S0", "1.0")
    assert (device.nqn, device.transport, device.nsid) == ("nqn.x:pcie", "pcie", 1)
    assert device.identity == device.eui == "0025385b11b2d1c7"
    assert device.nguid is device.uuid is None, "an identifier of zeros means none"
    assert (device.numa_node, device.rotational, device.read_only) == (1, False, False)
    assert device.holders == ("dm-0",)
    assert device.partitions == ("nvme0n1p1",)
    assert device.queue.nr_requests == 1023
    assert (device.queue.max_sectors_kb, device.queue.max_hw_sectors_kb) == (512, 2048)
    assert device.queue.scheduler == "none"
    assert device.queue.schedulers == ("none", "mq-deadline", "kyber")
    assert (device.queue.write_cache, device.queue.io_poll) == ("write through", False)
    (path,) = device.paths
    assert (path.controller, path.leg, path.address) == ("nvme0", None, "0000:00:10.0")
    assert path.fast_io_fail_tmo is path.ctrl_loss_tmo is None
    assert path.usable
    assert device.warnings == ()


def test_multipath_head_is_one_entry_with_its_legs_as_paths(tree: Tree) -> None:
    fabric(tree, states=(("live", "optimized"), ("live", "non-optimized")))
    (device,) = tree.discover()
    assert device.name == "nvme0n1"
    assert (device.nqn, device.model) == ("nqn.2024-01.org:array", "Array")
    assert (device.nguid, device.transport, device.iopolicy) == (NGUID, "tcp", "round-robin")
    assert [p.leg for p in device.paths] == ["nvme0c0n1", "nvme0c1n1"]
    assert [p.controller for p in device.paths] == ["nvme0", "nvme1"]
    assert [p.ana_state for p in device.paths] == ["optimized", "non-optimized"]
    assert device.paths[1].address == "traddr=10.0.0.1,trsvcid=4420"
    assert device.numa_node is None, "the paths lie on different nodes"
    assert (device.paths[0].ctrl_loss_tmo, device.paths[0].reconnect_delay) == (600, 10)
    assert device.paths[0].fast_io_fail_tmo == devices.OFF


def test_timeouts_and_policy_that_hurt_are_named(tree: Tree) -> None:
    fabric(tree, states=(("live", "optimized"), ("connecting", "inaccessible")))
    (device,) = tree.discover()
    text = "\n".join(device.warnings)
    assert "nvme1 (tcp traddr=10.0.0.1,trsvcid=4420) is connecting" in text
    assert "is inaccessible (ANA)" in text
    assert text.count("fast_io_fail_tmo is off") == 2
    assert "for 600 s" in text
    assert "round-robin" in text
    assert "queue-depth" in text
    assert "no path is usable" not in text


def test_timeout_for_ever_is_said(tree: Tree) -> None:
    fabric(tree, states=(("live", "optimized"),), loss="off")
    (device,) = tree.discover()
    assert device.paths[0].ctrl_loss_tmo == devices.OFF
    assert "hangs for ever" in "\n".join(device.warnings)


@pytest.mark.parametrize("policy", ["queue-depth", "numa"])
def test_well_set_up_paths_give_no_warning(policy: str, tree: Tree) -> None:
    states = (("live", "optimized"), ("live", "optimized"))
    fabric(tree, transport="rdma", states=states, fast="5", iopolicy=policy)
    (device,) = tree.discover()
    assert device.transport == "rdma"
    assert device.paths[0].fast_io_fail_tmo == 5
    assert [w for w in device.warnings if "numa" not in w] == []
    assert bool(device.warnings) == (policy == "numa"), "numa uses one path at a time"


def test_namespace_without_a_usable_path_is_not_touched(tree: Tree, asked: list[str]) -> None:
    fabric(tree, states=(("connecting", "optimized"), ("live", "inaccessible")))
    (device,) = devices.discover(tree.root)
    assert device.verdict.writable is None
    assert "hang" in device.verdict.details[0]
    assert asked == [], "the verdict would read from it, and hang"
    assert any("no path is usable" in warning for warning in device.warnings)


def test_made_up_device_without_a_node_has_no_verdict(tree: Tree, asked: list[str]) -> None:
    """The verdict of a made-up tree never looks at the real /dev."""
    pcie(tree)
    (device,) = devices.discover(tree.root)
    assert device.verdict.writable is None
    assert "No such file" in device.verdict.details[0]
    assert asked == [f"{tree.root}/dev/nvme0n1"]


def test_drive_seen_twice_with_multipath_off_is_named(tree: Tree) -> None:
    pcie(tree, 0, nguid=NGUID)
    pcie(tree, 1, nguid=NGUID)
    pcie(tree, 2, nguid=NGUID.replace("36", "37"))
    first, second, third = tree.discover()
    assert "also /dev/nvme1n1" in first.warnings[0]
    assert "also /dev/nvme0n1" in second.warnings[0]
    assert third.warnings == ()


def test_scheduler_and_zones_are_warned_of(tree: Tree) -> None:
    directory = pcie(tree)
    tree.files(directory / "queue", scheduler="none [mq-deadline]", zoned="host-managed")
    (device,) = tree.discover()
    assert "echo none > /sys/class/block/nvme0n1/queue/scheduler" in device.warnings[0]
    assert "zoned" in device.warnings[1]


def test_names_are_in_natural_order_and_empty_or_hidden_devices_left_out(tree: Tree) -> None:
    for name in ("loop10", "loop2", "vda", "dm-1", "zram0", "sda"):
        tree.block("virtual", name, mib=0 if name == "zram0" else 1)
    tree.block("virtual", "nvme3c1n1")  # a leg, by its name; one more by its flag
    tree.block("virtual", "sdz", hidden=1)
    found = tree.discover()
    assert [(d.name, d.kind) for d in found] == [
        ("dm-1", "device-mapper"), ("loop2", "loop"), ("loop10", "loop"), ("sda", "scsi"),
        ("vda", "virtio"),
    ]  # fmt: skip
    assert len(devices.discover(tree.root, verdicts=False, empty=True)) == 6


def test_device_that_vanishes_while_it_is_read_does_no_harm(tree: Tree) -> None:
    (tree.root / "sys/block/nvme7n1").symlink_to(tree.root / "gone")
    (tree.root / "sys/block/nvme8n1").mkdir()
    pcie(tree)
    assert [d.name for d in tree.discover()] == ["nvme0n1"]
    assert devices.discover(tree.root / "nowhere", verdicts=False) == ()


def test_values_are_frozen_and_ready_for_json(tree: Tree) -> None:
    fabric(tree, states=(("live", "optimized"),))
    (device,) = tree.discover()
    with pytest.raises(FrozenInstanceError):
        device.name = "x"  # type: ignore[misc]
    again = json.loads(json.dumps(device.to_dict()))
    assert again["paths"][0]["state"] == "live"
    assert again["queue"]["nr_requests"] == 1023
    assert again["identity"] == NGUID
    assert again["verdict"]["writable"] is None


# ---- this machine ------------------------------------------------------------------------------


def test_own_devices_are_those_of_sys_block() -> None:
    found = {device.name: device for device in devices.discover(empty=True)}
    assert set(found) == {
        path.name
        for path in Path("/sys/block").iterdir()
        if (path / "hidden").read_text().strip() != "1"
    }
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    for device in found.values():
        number = Path(f"/sys/block/{device.name}/dev").read_text().strip()
        if any(line.split()[2] == number for line in mounts):
            assert device.verdict.writable is False
            assert "mounted" in device.verdict.reasons
            assert not device.verdict.overridable
        json.dumps(device.to_dict())


@pytest.mark.root
def test_loop_device_is_described_as_it_is(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(16 * MIB))
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    with loop_device(image, "--sector-size", "4096") as path:
        device = devices.describe(path)
        assert device == next(d for d in devices.discover() if d.path == path)
        assert device.path == path
        assert device.kind == "loop"
        assert device.backing_file == str(image)
        assert device.size_bytes == int(run(tool("blockdev"), "--getsize64", path))
        assert device.logical_block == int(run(tool("blockdev"), "--getss", path)) == 4096
        assert device.verdict.writable is False
        assert device.verdict.overridable
        assert device.verdict.reasons == ("signature",)
        assert device.verdict.details == ("ext2/3/4 signature at 1080",)
        assert devices.describe(path.removeprefix("/dev/")).name == device.name
        run(tool("wipefs"), "-qa", path)
        assert devices.describe(path).verdict.writable is True


def test_describe_of_what_is_no_device(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, error in [
        (tmp_path / "file", ValueError),
        ("/dev/null", ValueError),
        (tmp_path / "absent", FileNotFoundError),
        ("nvme99n99", FileNotFoundError),
    ]:
        with pytest.raises(error):
            devices.describe(path, verdict=False)


def test_reason_words_are_the_bits_of_the_c_header() -> None:
    header = (Path(__file__).resolve().parents[2] / "csrc/safety.h").read_text()
    for word, bit in devices._REASONS.items():
        name = f"KVIO_UNSAFE_{word.upper().replace('-', '_')}"
        assert f"#define {name} (1u << {bit.bit_length() - 1})" in header
