# SPDX-License-Identifier: Apache-2.0
"""Checks of the kernel, io_uring, limits, the container and the CPUs."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from kvio.diagnose._finding import Finding, Host, Severity, size
from kvio.uring import Op, op_name

_GOOD_KERNEL = (6, 1)
_MIN_NOFILE = 1024
_ENGINE_OPS = (Op.READ, Op.WRITE, Op.READV, Op.WRITEV, Op.READ_FIXED, Op.WRITE_FIXED, Op.FSYNC)
_SECCOMP_REMEDY = (
    "docker, podman: --security-opt seccomp=PROFILE.json with io_uring_setup, io_uring_enter and "
    "io_uring_register allowed (or seccomp=unconfined); Kubernetes: securityContext."
    "seccompProfile; systemd: SystemCallFilter=@aio"
)


def check_kernel(host: Host) -> Iterator[Finding]:
    """Release of the kernel; what it can do is tried elsewhere."""
    release = host.text("proc/sys/kernel/osrelease") or host.capabilities.kernel
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version >= _GOOD_KERNEL:
        yield Finding("kernel", Severity.OK, f"Linux {release}")
        return
    yield Finding(
        "kernel",
        Severity.WARN,
        f"Linux {release} is older than 6.1",
        "DEFER_TASKRUN, with which completions cost less CPU, came with 6.1",
        "boot a newer kernel (Debian: apt-get install linux-image-amd64; RHEL: dnf update kernel)",
    )


def check_core(host: Host) -> Iterator[Finding]:
    """The compiled engine loads."""
    if host.core_error:
        yield Finding(
            "engine",
            Severity.FAIL,
            "kvio's compiled engine does not load",
            host.core_error,
            "build it: make setup, or pip install . in the source tree",
        )
    else:
        yield Finding("engine", Severity.OK, "kvio's compiled engine loads")


def _refusal_remedy(host: Host) -> str:
    caps = host.capabilities
    remedies = []
    if caps.errno == errno.EPERM and caps.io_uring_disabled:
        remedies.append("sysctl -w kernel.io_uring_disabled=0")
    if caps.seccomp_mode == 2 and caps.errno in (errno.EPERM, errno.ENOSYS):
        remedies.append(_SECCOMP_REMEDY)
    if not remedies and caps.errno == errno.EPERM:
        remedies.append("look for the denial: ausearch -m avc -ts recent, or journalctl -k")
    if not remedies and caps.errno == errno.ENOSYS:
        remedies.append("boot a kernel with CONFIG_IO_URING=y")
    if caps.errno == errno.ENOMEM:
        remedies.append("ulimit -l unlimited")
    if caps.errno == errno.EMFILE:
        remedies.append("ulimit -n 65536")
    return "; ".join(remedies)


def check_io_uring(host: Host) -> Iterator[Finding]:
    """A ring can be made and used, and with which flags."""
    caps = host.capabilities
    if not caps.available:
        yield Finding(
            "io_uring",
            Severity.FAIL,
            caps.reason,
            "kvio uses preadv2/pwritev2 threads instead, at a higher cost per I/O",
            _refusal_remedy(host),
        )
        return
    missing = [op_name(op) for op in _ENGINE_OPS if op not in caps.ops]
    if caps.ops and missing:
        yield Finding(
            "io_uring",
            Severity.FAIL,
            f"io_uring lacks operations that kvio needs: {', '.join(missing)}",
            remedy="boot Linux 5.6 or newer",
        )
        return
    yield Finding("io_uring", Severity.OK, f"io_uring is granted, with {len(caps.ops)} operations")
    refused = {name: grant for name, grant in caps.setup.items() if not grant}
    if caps.setup and "engine" in refused:
        yield Finding(
            "io_uring.flags",
            Severity.WARN,
            "the cheap completion modes of io_uring are not granted",
            "refused: " + ", ".join(n for n in refused if n != "engine"),
            "boot Linux 6.1 or newer",
        )
    elif refused:
        yield Finding(
            "io_uring.flags", Severity.INFO, f"not granted: {', '.join(refused)}",
            "SQE128 and CQE32 are for NVMe passthrough, IOPOLL for poll queues",
        )  # fmt: skip
    else:
        yield Finding("io_uring.flags", Severity.OK, "all set-up flags tried are granted")


def check_registration(host: Host) -> Iterator[Finding]:
    """Buffers can be registered, and as many as are needed."""
    caps = host.capabilities
    if not caps.available:
        return
    buffers = caps.register.get("buffers")
    if buffers is not None and not buffers and buffers.errno != errno.ENOMEM:
        yield Finding(
            "limits.memlock",
            Severity.WARN,
            f"buffers cannot be registered: {buffers.to_dict()['errno']}",
            "kvio then passes plain addresses, and the kernel pins pages for every I/O",
            _SECCOMP_REMEDY if caps.seccomp_mode == 2 else "",
        )
        return
    need = host.need_bytes
    if caps.ipc_lock or caps.memlock_bytes is None:
        why = "CAP_IPC_LOCK" if caps.ipc_lock else "RLIMIT_MEMLOCK is unlimited"
        yield Finding("limits.memlock", Severity.OK, f"registered buffers are not limited ({why})")
    elif need <= caps.memlock_bytes:
        yield Finding(
            "limits.memlock",
            Severity.OK,
            f"RLIMIT_MEMLOCK {size(caps.memlock_bytes)} is enough to register {size(need)}",
        )
    else:
        yield Finding(
            "limits.memlock",
            Severity.WARN,
            f"RLIMIT_MEMLOCK {size(caps.memlock_bytes)} is less than the {size(need)} of buffers",
            f"the largest buffer that could be registered: {size(caps.registrable_bytes)}; the "
            "limit is one for all processes of the user, and a huge page counts whole",
            "ulimit -l unlimited (/etc/security/limits.d/kvio.conf: `* - memlock unlimited`); "
            "systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1",
        )


def check_seccomp(host: Host) -> Iterator[Finding]:
    """A system call filter is on this process."""
    caps = host.capabilities
    if caps.seccomp_mode is None:
        return
    if caps.seccomp_mode == 0:
        yield Finding("seccomp", Severity.OK, "no seccomp filter is on this process")
        return
    status = host.fields("proc/self/status")
    yield Finding(
        "seccomp",
        Severity.INFO,
        f"{status.get('Seccomp_filters', 'a')} seccomp filter(s) on this process, "
        + ("which let io_uring pass" if caps.available else "see io_uring"),
        f"Seccomp: {caps.seccomp_mode}, NoNewPrivs: {status.get('NoNewPrivs', '?')} "
        "in /proc/self/status",
    )


def check_nofile(host: Host) -> Iterator[Finding]:
    """Room for descriptors: members, rings, eventfds."""
    if host.nofile >= _MIN_NOFILE or host.nofile < 0:
        shown = "unlimited" if host.nofile < 0 else host.nofile
        yield Finding("limits.nofile", Severity.OK, f"up to {shown} open files")
        return
    yield Finding(
        "limits.nofile",
        Severity.WARN,
        f"only {host.nofile} open files are allowed",
        "a volume opens each member once or twice, and a ring and an eventfd a worker",
        "ulimit -n 65536; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536",
    )


def container(host: Host) -> str:
    """Which container runtime this process runs under, by the marks that they leave, or ""."""
    groups = host.text("proc/1/cgroup") or ""
    marks = [
        ("Kubernetes", "KUBERNETES_SERVICE_HOST" in host.environ or "kubepods" in groups),
        ("podman", host.exists("run/.containerenv") or "libpod" in groups),
        ("docker", host.exists(".dockerenv") or "docker" in groups),
        ("lxc", "/lxc" in groups),
        (host.environ.get("container", ""), True),
    ]
    return next((name for name, seen in marks if seen and name), "")


def check_container(host: Host) -> Iterator[Finding]:
    """A container, which often means a filter, a small memlock limit and a CPU quota."""
    name = container(host)
    if name:
        yield Finding(
            "container",
            Severity.INFO,
            f"inside a container ({name})",
            "io_uring, memlock and CPUs are what its runtime grants, not what the host has",
        )


def _group_directories(host: Host, controller: str) -> Iterator[str]:
    """This process's control group directory for a controller and those above it, innermost first.

    In a container the path may be the host's, of which only the upper part is visible.
    """
    for line in (host.text("proc/self/cgroup") or "").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            tops = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in names.split(","):
            tops = [f"sys/fs/cgroup/{names}", f"sys/fs/cgroup/{controller}"]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for top in tops:
            for depth in range(len(parts), -1, -1):
                yield "/".join([top, *parts[:depth]])


def cpu_quota(host: Host) -> float | None:
    """CPUs that the control groups of this process allow it, None without a quota."""
    quotas = []
    for directory in _group_directories(host, "cpu"):
        words = (host.text(f"{directory}/cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota = host.number(f"{directory}/cpu.cfs_quota_us")
        period = host.number(f"{directory}/cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def check_cpus(host: Host) -> Iterator[Finding]:
    """CPUs, affinity and quota."""
    quota = cpu_quota(host)
    if quota is not None and quota < host.cpus:
        yield Finding(
            "cpu.quota",
            Severity.WARN,
            f"a CPU quota allows {quota:g} of {host.cpus} CPUs",
            "when it is used up every thread stops until the next period, which shows as "
            "latencies of tens of milliseconds",
            f"docker, podman: --cpus={host.cpus}; Kubernetes: resources.limits.cpu",
        )
    if host.cpus < host.cpus_online:
        yield Finding(
            "cpu.count",
            Severity.INFO,
            f"this process may use {host.cpus} of {host.cpus_online} CPUs",
            "the affinity was set by taskset, numactl or a cpuset",
        )
    elif host.cpus == 1:
        yield Finding(
            "cpu.count",
            Severity.WARN,
            "there is one CPU",
            "completions, workers and Python take turns on it; do not use SQPOLL",
        )
    else:
        yield Finding("cpu.count", Severity.OK, f"{host.cpus} CPUs")


def check_numa(host: Host) -> Iterator[Finding]:
    """More than one memory node: devices are near to one of them."""
    try:
        entries = [path.name for path in (host.root / "sys/devices/system/node").iterdir()]
    except OSError:
        return
    nodes = sorted(int(name[4:]) for name in entries if re.fullmatch(r"node\d+", name))
    if len(nodes) <= 1:
        yield Finding("numa", Severity.OK, "one NUMA node")
        return
    yield Finding(
        "numa",
        Severity.INFO,
        f"{len(nodes)} NUMA nodes",
        "I/O is fastest from the node that the device hangs on (`kvio info` lists it)",
        f"numactl --cpunodebind={nodes[0]} --membind={nodes[0]} PROGRAM",
    )


def check_programs(host: Host) -> Iterator[Finding]:
    """liburing inside kvio, and fio to compare with."""
    version = host.capabilities.liburing
    yield Finding(
        "liburing",
        Severity.OK if version else Severity.INFO,
        f"built with liburing {version}" if version else "built with a liburing of unknown version",
    )
    if host.fio:
        yield Finding("fio", Severity.OK, f"fio is at {host.fio}")
    else:
        yield Finding(
            "fio",
            Severity.INFO,
            "fio is not installed",
            "`kvio bench --compare-fio` runs the same job under it",
            "apt-get install fio, or dnf install fio",
        )
