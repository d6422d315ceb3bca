# SPDX-License-Identifier: Apache-2.0
"""kvio.diagnose: the checks of a host, on hosts made up for each, and on this machine."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from kvio import diagnose, uring
from kvio.diagnose import Finding, Host, Severity, _memory, _system
from kvio.uring import Features, Grant

GOOD = uring.Capabilities(
    available=True,
    errno=None,
    reason="",
    kernel="6.12.0",
    liburing="2.3",
    io_uring_disabled=0,
    seccomp_mode=0,
    features=Features(0),
    setup={"engine": Grant(True), "SQE128": Grant(True)},
    register={"buffers": Grant(True)},
    ops=frozenset(range(60)),
    memlock_bytes=8 << 20,
    ipc_lock=False,
    registrable_bytes=8 << 20,
    limit_bytes=64 << 20,
)
REFUSED = replace(
    GOOD, available=False, errno=errno.EPERM, reason="io_uring_setup is refused with EPERM: why",
    setup={}, register={}, ops=frozenset(),
)  # fmt: skip


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host of which nothing is known but that io_uring works."""
    return Host(capabilities=GOOD, root=tmp_path, cpus=8, cpus_online=8, fio="/usr/bin/fio")


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


# --- kernel, io_uring, limits ---


@pytest.mark.parametrize(
    ("release", "severity"),
    [
        ("6.1.0-13-amd64", Severity.OK),
        ("6.18.44", Severity.OK),
        ("10.0", Severity.OK),
        ("5.19.0", Severity.WARN),
        ("4.18.0-372.el8", Severity.WARN),
        ("odd", Severity.WARN),
    ],
)
def test_kernel_is_judged_by_its_numbers(host: Host, release: str, severity: Severity) -> None:
    write(host.root, {"proc/sys/kernel/osrelease": release})
    finding = only(_system.check_kernel(host))
    assert (finding.severity, release in finding.title) == (severity, True)
    assert bool(finding.remedy) == (severity is Severity.WARN)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"io_uring_disabled": 2}, "sysctl -w kernel.io_uring_disabled=0"),
        ({"seccomp_mode": 2}, "--security-opt seccomp="),
        ({"errno": errno.ENOSYS, "seccomp_mode": 2}, "SystemCallFilter="),
        ({}, "ausearch"),
        ({"errno": errno.ENOSYS}, "CONFIG_IO_URING=y"),
        ({"errno": errno.ENOMEM}, "ulimit -l"),
        ({"errno": errno.EMFILE}, "ulimit -n"),
    ],
)
def test_refused_io_uring_fails_with_the_remedy_for_its_cause(
    host: Host, changes: dict[str, int], remedy: str
) -> None:
    host = replace(host, capabilities=replace(REFUSED, **changes))  # type: ignore[arg-type]
    finding = only(_system.check_io_uring(host))
    assert (finding.id, finding.severity) == ("io_uring", Severity.FAIL)
    assert finding.title == REFUSED.reason
    assert remedy in finding.remedy
    assert list(_system.check_registration(host)) == []


def test_flags_and_operations_that_are_missing_are_named(host: Host) -> None:
    no = Grant(False, errno.EINVAL)
    without_engine = replace(GOOD, setup={"engine": no, "SINGLE_ISSUER|DEFER_TASKRUN": no})
    found = by_id(_system.check_io_uring(replace(host, capabilities=without_engine)))
    assert found["io_uring.flags"].severity is Severity.WARN
    assert "SINGLE_ISSUER|DEFER_TASKRUN" in found["io_uring.flags"].detail
    without_wide = replace(GOOD, setup={"engine": Grant(True), "SQE128": no})
    found = by_id(_system.check_io_uring(replace(host, capabilities=without_wide)))
    assert found["io_uring.flags"].severity is Severity.INFO
    old = replace(GOOD, ops=frozenset(range(20)))
    finding = only(_system.check_io_uring(replace(host, capabilities=old)))
    assert (finding.severity, "READ, WRITE" in finding.title) == (Severity.FAIL, True)


@pytest.mark.parametrize(
    ("changes", "need_mib", "severity", "text"),
    [
        ({}, 8, Severity.OK, "RLIMIT_MEMLOCK 8 MiB is enough"),
        ({}, 9, Severity.WARN, "RLIMIT_MEMLOCK 8 MiB is less than the 9 MiB"),
        ({"ipc_lock": True}, 9, Severity.OK, "CAP_IPC_LOCK"),
        ({"memlock_bytes": None}, 9, Severity.OK, "unlimited"),
        ({"register": {"buffers": Grant(False, errno.EPERM)}}, 1, Severity.WARN, "EPERM"),
        ({"register": {"buffers": Grant(False, errno.ENOMEM)}}, 9, Severity.WARN, "less than"),
    ],
)
def test_memlock_is_held_against_the_need(
    host: Host, changes: dict[str, object], need_mib: int, severity: Severity, text: str
) -> None:
    caps = replace(GOOD, **changes)  # type: ignore[arg-type]
    finding = only(
        _system.check_registration(replace(host, capabilities=caps, need_bytes=need_mib << 20))
    )
    assert (finding.id, finding.severity) == ("limits.memlock", severity)
    assert text in finding.title
    if "less than" in text:
        assert "ulimit -l unlimited" in finding.remedy


def test_seccomp_filter_is_reported_with_its_count(host: Host) -> None:
    write(host.root, {"proc/self/status": "NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3"})
    finding = only(_system.check_seccomp(replace(host, capabilities=replace(GOOD, seccomp_mode=2))))
    assert (finding.severity, "3 seccomp filter" in finding.title) == (Severity.INFO, True)
    assert "NoNewPrivs: 1" in finding.detail
    assert only(_system.check_seccomp(host)).severity is Severity.OK


def test_few_open_files_are_a_warning(host: Host) -> None:
    assert only(_system.check_nofile(replace(host, nofile=256))).severity is Severity.WARN
    assert only(_system.check_nofile(replace(host, nofile=1024))).severity is Severity.OK
    assert only(_system.check_nofile(replace(host, nofile=-1))).severity is Severity.OK


def test_engine_that_does_not_load_fails(host: Host) -> None:
    finding = only(_system.check_core(replace(host, core_error="no module named kvio._core")))
    assert (finding.severity, finding.detail) == (Severity.FAIL, "no module named kvio._core")
    assert only(_system.check_core(host)).severity is Severity.OK


# --- container, CPUs, memory nodes ---


@pytest.mark.parametrize(
    ("files", "environ", "name"),
    [
        ({}, {}, ""),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {"container": "podman"}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes"),
        ({"proc/1/cgroup": "0::/kubepods/besteffort/pod1"}, {}, "Kubernetes"),
        ({"proc/1/cgroup": "4:memory:/docker/0123"}, {}, "docker"),
        ({}, {"container": "systemd-nspawn"}, "systemd-nspawn"),
    ],
)
def test_container_is_known_by_the_marks_of_its_runtime(
    host: Host, files: dict[str, str], environ: dict[str, str], name: str
) -> None:
    write(host.root, files)
    host = replace(host, environ=environ)
    assert _system.container(host) == name
    assert len(list(_system.check_container(host))) == bool(name)


CGROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", f"{CGROUP}/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", f"{CGROUP}/cpu.max": "250000 100000"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                f"{CGROUP}/a/b/cpu.max": "max 100000",
                f"{CGROUP}/a/cpu.max": "150000 100000",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/docker/0123\n0::/",
                f"{CGROUP}/cpu,cpuacct/cpu.cfs_quota_us": "400000",
                f"{CGROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                f"{CGROUP}/cpu/cpu.cfs_quota_us": "-1",
                f"{CGROUP}/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
    ids=["none", "v2 max", "v2", "v2 parent", "v1 seen from inside", "v1 unlimited"],
)
def test_cpu_quota_is_the_smallest_of_the_groups(
    host: Host, files: dict[str, str], quota: float | None
) -> None:
    """Goal: cgroup v1 and v2, own group and those above. Method: trees below a made-up root."""
    write(host.root, files)
    assert _system.cpu_quota(host) == quota
    found = by_id(_system.check_cpus(host))
    assert ("cpu.quota" in found) == (quota is not None)
    if quota is not None:
        assert f"allows {quota:g} of 8 CPUs" in found["cpu.quota"].title


def test_one_cpu_and_an_affinity_are_told_apart(host: Host) -> None:
    one = only(_system.check_cpus(replace(host, cpus=1, cpus_online=1)))
    assert (one.severity, "SQPOLL" in one.detail) == (Severity.WARN, True)
    bound = only(_system.check_cpus(replace(host, cpus=1, cpus_online=8)))
    assert (bound.severity, bound.title) == (Severity.INFO, "this process may use 1 of 8 CPUs")


def test_numa_nodes_are_counted(host: Host) -> None:
    node = "sys/devices/system/node"
    write(host.root, {f"{node}/node0/cpulist": "0-3", f"{node}/has_cpu": "0"})
    assert only(_system.check_numa(host)).severity is Severity.OK
    write(host.root, {f"{node}/node1/cpulist": "4-7"})
    finding = only(_system.check_numa(host))
    assert (finding.severity, "2 NUMA nodes" in finding.title) == (Severity.INFO, True)
    assert finding.remedy.startswith("numactl --cpunodebind=0")


def test_missing_fio_and_unknown_liburing_are_information(host: Host) -> None:
    bare = replace(host, fio=None, capabilities=replace(GOOD, liburing=""))
    found = by_id(_system.check_programs(bare))
    assert {f.severity for f in found.values()} == {Severity.INFO}
    assert "apt-get install fio" in found["fio"].remedy
    assert {f.severity for f in _system.check_programs(host)} == {Severity.OK}


# --- huge pages ---


def pool(total: int, free: int, reserved: int = 0) -> dict[str, str]:
    numbers = {"nr": total, "free": free, "resv": reserved}
    return {f"{_memory._POOL}/{key}_hugepages": str(value) for key, value in numbers.items()}


def thp(enabled: str, defrag: str) -> dict[str, str]:
    return {f"{_memory._THP}/enabled": enabled, f"{_memory._THP}/defrag": defrag}


def test_huge_pages_that_are_reserved_are_not_free(host: Host) -> None:
    host = replace(host, need_bytes=1 << 30)
    write(host.root, pool(600, 512))
    assert only(_memory.check_hugetlb(host)).severity is Severity.OK
    write(host.root, pool(600, 512, reserved=1))
    finding = only(_memory.check_hugetlb(host))
    assert "511 huge pages of 2 MiB are free, and 1 GiB of buffers take 512" in finding.title
    assert finding.severity is Severity.WARN  # no transparent ones either
    assert finding.remedy.startswith("sysctl -w vm.nr_hugepages=601 ")
    write(host.root, thp("always [madvise] never", "madvise"))
    assert only(_memory.check_hugetlb(host)).severity is Severity.INFO


@pytest.mark.parametrize(
    ("enabled", "defrag", "expected"),
    [
        ("always madvise [never]", "[madvise]", {"memory.thp": "warn"}),
        ("", "", {"memory.thp": "warn"}),
        ("[always] never", "[always]", {"memory.thp": "ok", "memory.thp_defrag": "warn"}),
        ("[madvise]", "[never]", {"memory.thp": "ok", "memory.thp_defrag": "info"}),
        ("[madvise]", "[defer]", {"memory.thp": "ok", "memory.thp_defrag": "info"}),
        ("[madvise]", "[defer+madvise]", {"memory.thp": "ok", "memory.thp_defrag": "ok"}),
    ],
)
def test_transparent_huge_pages_by_mode(
    host: Host, enabled: str, defrag: str, expected: dict[str, str]
) -> None:
    write(host.root, thp(enabled, defrag))
    found = by_id(_memory.check_transparent(host))
    assert {key: str(f.severity) for key, f in found.items()} == expected
    for finding in found.values():
        if finding.remedy:
            assert finding.remedy.startswith("echo ")
            assert f"/{_memory._THP}/" in finding.remedy


# --- all of it ---


def test_this_machine_is_diagnosed_with_unique_ids(tmp_path: Path) -> None:
    (tmp_path / "member").write_bytes(b"x" * 65536)
    found = diagnose.diagnose([tmp_path / "member"], need_bytes=1 << 20)
    ids = [finding.id for finding in found]
    assert len(ids) == len(set(ids))
    assert {"kernel", "engine", "io_uring", "liburing", f"direct:{tmp_path / 'member'}"} <= set(ids)
    for finding in found:
        assert finding.title
        if finding.severity is Severity.FAIL:
            assert finding.remedy
    assert diagnose.worst(found) == max((f.severity for f in found), key=lambda s: s.rank)


def test_nothing_known_below_an_empty_root_is_no_error(tmp_path: Path) -> None:
    assert {f.id for f in diagnose.diagnose(root=tmp_path)} >= {"kernel", "io_uring", "devices"}


def test_severities_are_ordered() -> None:
    ranks = [
        severity.rank for severity in (Severity.OK, Severity.INFO, Severity.WARN, Severity.FAIL)
    ]
    assert ranks == [0, 1, 2, 3]
    assert diagnose.worst([]) is Severity.OK
