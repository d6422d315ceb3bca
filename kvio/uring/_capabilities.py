# SPDX-License-Identifier: Apache-2.0
"""What the running kernel really grants, found by trying: versions and feature bits both lie."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvio.uring._constants import Features, SetupFlags
from kvio.uring._grants import Grant, attempt
from kvio.uring._register import Ring, op_name
from kvio.uring._types import errno_name, version

_NOP_TIMEOUT_S = 2.0
_CAP_IPC_LOCK = 1 << 14
_CAP_SYS_ADMIN = 1 << 21
_SECCOMP_FILTER = 2

ENGINE_FLAGS = (
    SetupFlags.SINGLE_ISSUER
    | SetupFlags.DEFER_TASKRUN
    | SetupFlags.TASKRUN_FLAG
    | SetupFlags.SUBMIT_ALL
    | SetupFlags.R_DISABLED
)
_SETUPS: Mapping[str, SetupFlags] = {
    "SUBMIT_ALL": SetupFlags.SUBMIT_ALL,
    "R_DISABLED": SetupFlags.R_DISABLED,
    "COOP_TASKRUN": SetupFlags.COOP_TASKRUN,
    "COOP_TASKRUN|TASKRUN_FLAG": SetupFlags.COOP_TASKRUN | SetupFlags.TASKRUN_FLAG,
    "SINGLE_ISSUER": SetupFlags.SINGLE_ISSUER,
    "SINGLE_ISSUER|DEFER_TASKRUN": SetupFlags.SINGLE_ISSUER | SetupFlags.DEFER_TASKRUN,
    "engine": ENGINE_FLAGS,
    "SQE128": SetupFlags.SQE128,
    "CQE32": SetupFlags.CQE32,
    "SQE128|CQE32": SetupFlags.SQE128 | SetupFlags.CQE32,
    "IOPOLL": SetupFlags.IOPOLL,
    "SQPOLL": SetupFlags.SQPOLL,
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What `capabilities` found.

    Attributes
    ----------
    available
        A ring was made and a request went through it.
    errno, reason
        When not: the kernel's errno, and who refuses, as far as it can be told.
    kernel, liburing
        Release of the running kernel; version of the liburing inside kvio.
    io_uring_disabled
        The sysctl of that name, None before Linux 6.6.
    seccomp_mode
        `Seccomp:` of /proc/self/status: 2 is a filter, as container runtimes install.
    features
        The kernel's own feature bits.
    setup
        Set-up flags, each tried with a request. "engine" is the combination that volumes use.
    register
        Registrations, each tried.
    ops
        Numbers of the operations that the kernel's probe lists as carried out.
    memlock_bytes
        RLIMIT_MEMLOCK, None when unlimited; `ipc_lock` says that it does not apply.
    registrable_bytes
        The largest buffer that could be registered, of the `limit_bytes` tried.
    """

    available: bool
    errno: int | None
    reason: str
    kernel: str
    liburing: str
    io_uring_disabled: int | None
    seccomp_mode: int | None
    features: Features
    setup: Mapping[str, Grant]
    register: Mapping[str, Grant]
    ops: frozenset[int]
    memlock_bytes: int | None
    ipc_lock: bool
    registrable_bytes: int
    limit_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, operations and features by name."""
        return {
            "available": self.available,
            "errno": None if self.errno is None else errno_name(self.errno),
            "reason": self.reason,
            "kernel": self.kernel,
            "liburing": self.liburing,
            "io_uring_disabled": self.io_uring_disabled,
            "seccomp_mode": self.seccomp_mode,
            "features": [str(feature.name) for feature in self.features],
            "setup": {name: grant.to_dict() for name, grant in self.setup.items()},
            "register": {name: grant.to_dict() for name, grant in self.register.items()},
            "ops": [op_name(number) for number in sorted(self.ops)],
            "memlock_bytes": self.memlock_bytes,
            "ipc_lock": self.ipc_lock,
            "registrable_bytes": self.registrable_bytes,
            "limit_bytes": self.limit_bytes,
        }


def explain_refusal(
    error: int, *, call: str, disabled: int | None, seccomp_mode: int | None, privileged: bool
) -> str:
    """Who refuses io_uring, from what can be seen.

    Parameters
    ----------
    error
        The errno that `call` gave.
    disabled
        sysctl kernel.io_uring_disabled, or None.
    seccomp_mode
        From /proc/self/status, or None.
    privileged
        CAP_SYS_ADMIN is effective.
    """
    name = errno_name(error)
    filtered = "a seccomp filter is on this process (Seccomp: 2 in /proc/self/status)"
    causes = []
    if error == errno.EPERM:
        if disabled == 2:
            causes.append("sysctl kernel.io_uring_disabled is 2: off for everyone")
        if disabled == 1 and not privileged:
            causes.append(
                "sysctl kernel.io_uring_disabled is 1: off without CAP_SYS_ADMIN and outside of "
                "kernel.io_uring_group"
            )
        if seccomp_mode == _SECCOMP_FILTER:
            causes.append(filtered)
        if not causes:
            causes.append("neither the sysctl nor seccomp does it, so a security module (LSM) may")
    elif error == errno.ENOSYS:
        if seccomp_mode == _SECCOMP_FILTER:
            causes.append(filtered)
        else:
            causes.append("the kernel is older than 5.1 or built without CONFIG_IO_URING")
    else:
        causes.append(os.strerror(error))
    return f"{call} is refused with {name}: {'; '.join(causes)}"


def _status_fields(root: str) -> dict[str, str]:
    try:
        text = Path(root, "proc/self/status").read_text()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (ln.partition(":") for ln in text.splitlines())}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _nop(ring: Ring) -> None:
    ring.prep_nop()
    ring.submit()
    timed = bool(ring.features & Features.EXT_ARG)
    ring.wait_cqe(timeout=_NOP_TIMEOUT_S if timed else None)


def _try_setup(flags: SetupFlags) -> None:
    with Ring(4, flags=flags) as ring:
        if flags & SetupFlags.R_DISABLED:
            ring.enable()
        _nop(ring)


def _registrations() -> dict[str, Grant]:
    page = mmap.mmap(-1, mmap.PAGESIZE)

    def on_ring(act: Callable[[Ring], object]) -> Grant:
        def work() -> None:
            with Ring(4) as ring:
                act(ring)

        return attempt(work)

    def clone(ring: Ring) -> None:
        ring.register_buffers([page])
        with Ring(4) as other:
            other.clone_buffers(ring)

    def ring_fd(ring: Ring) -> None:
        ring.register_ring_fd()
        _nop(ring)

    return {
        "probe": on_ring(lambda ring: ring.probe()),
        "buffers": on_ring(lambda ring: ring.register_buffers([page])),
        "buffers_sparse": on_ring(lambda ring: ring.register_buffers_sparse(8)),
        "clone_buffers": on_ring(clone),
        "files": on_ring(lambda ring: ring.register_files([-1])),
        "files_sparse": on_ring(lambda ring: ring.register_files_sparse(8)),
        "ring_fd": on_ring(ring_fd),
    }


def _registrable_bytes(limit_bytes: int) -> int:
    """The largest size, in pages, that one registration takes; `limit_bytes` at most.

    One ring for all tries: what a closed ring had locked is given back a little later.
    """
    memory = mmap.mmap(-1, limit_bytes)
    # a huge page is charged whole, however little of it is registered
    memory.madvise(mmap.MADV_NOHUGEPAGE)

    def fits(ring: Ring, pages: int) -> bool:
        with memoryview(memory)[: pages * mmap.PAGESIZE] as part:
            granted = attempt(lambda: ring.register_buffers([part])).granted
            if granted:
                ring.unregister_buffers()
        return granted

    low, high = 0, limit_bytes // mmap.PAGESIZE
    with Ring(2) as ring:
        if fits(ring, high):
            return limit_bytes
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(ring, middle) else (low, middle)
    return low * mmap.PAGESIZE


def _usable() -> tuple[int | None, str, Features, frozenset[int]]:
    """Makes a ring and sends a NOP through it. The refusing errno and call, or what it showed."""
    call = "io_uring_setup"
    try:
        with Ring(4) as ring:
            call = "io_uring_enter"
            _nop(ring)
            features = ring.features
            try:
                return None, "", features, ring.probe().supported
            except OSError:  # before 5.6, or io_uring_register refused: see `register`
                return None, "", features, frozenset()
    except OSError as error:
        return error.errno or errno.EIO, call, Features(0), frozenset()


def capabilities(*, limit_bytes: int = 64 << 20, root: str = "/") -> Capabilities:
    """Find out what io_uring this process is granted. Takes some 0.1 s; touches no device.

    Parameters
    ----------
    limit_bytes
        The largest registered buffer to try, a multiple of the page size.
    root
        Prefix of /proc, for tests. The system calls are real in any case.
    """
    status = _status_fields(root)
    caps = int(status.get("CapEff", "0"), 16)
    seccomp = int(status["Seccomp"]) if "Seccomp" in status else None
    disabled = _number(Path(root, "proc/sys/kernel/io_uring_disabled"))
    error, call, features, ops = _usable()
    reason, setup, register, registrable = "", {}, {}, 0
    if error is not None:
        reason = explain_refusal(
            error, call=call, disabled=disabled, seccomp_mode=seccomp,
            privileged=bool(caps & _CAP_SYS_ADMIN),
        )  # fmt: skip
    else:
        for name, flags in _SETUPS.items():
            setup[name] = attempt(lambda flags=flags: _try_setup(flags))  # type: ignore[misc]
        register = _registrations()
        registrable = _registrable_bytes(limit_bytes) if register["buffers"] else 0
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Capabilities(
        available=error is None,
        errno=error,
        reason=reason,
        kernel=platform.release(),
        liburing=version(),
        io_uring_disabled=disabled,
        seccomp_mode=seccomp,
        features=features,
        setup=setup,
        register=register,
        ops=ops,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        ipc_lock=bool(caps & _CAP_IPC_LOCK),
        registrable_bytes=registrable,
        limit_bytes=limit_bytes,
    )
