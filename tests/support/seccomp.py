# SPDX-License-Identifier: Apache-2.0
"""Refuse system calls in a child process, the way a container runtime does.

`install` puts a real seccomp BPF filter on the calling thread; it cannot be taken off again, so
it belongs in a child. `run_refused` runs Python code in such a child. Needs no libseccomp.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

IO_URING_SYSCALLS = (425, 426, 427)  # setup, enter, register: the same on every current machine

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LD_WORD_ABS = 0x20
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_OFFSET_NR = 0  # struct seccomp_data: int nr; __u32 arch; ...
_OFFSET_ARCH = 4
_RET_ERRNO = 0x00050000
_RET_ALLOW = 0x7FFF0000
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2

_REPOSITORY = Path(__file__).resolve().parents[2]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def _instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, k)


def _assemble(error: int, syscalls: Sequence[int]) -> bytes:
    """Another architecture, or none of `syscalls`: allow. Else: return `error`."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise NotImplementedError(f"no seccomp architecture number known for {machine}")
    tests = [
        _instruction(_JUMP_IF_EQUAL, number, jump_true=len(syscalls) - index)
        for index, number in enumerate(syscalls)
    ]
    return b"".join(
        [
            _instruction(_LD_WORD_ABS, _OFFSET_ARCH),
            _instruction(_JUMP_IF_EQUAL, _AUDIT_ARCH[machine], jump_false=len(syscalls) + 1),
            _instruction(_LD_WORD_ABS, _OFFSET_NR),
            *tests,
            _instruction(_RETURN, _RET_ALLOW),
            _instruction(_RETURN, _RET_ERRNO | error),
        ]
    )


def install(errno: int, syscalls: Sequence[int] = IO_URING_SYSCALLS) -> None:
    """Make `syscalls` fail with `errno` in this thread, for good, and in threads it starts later.

    Parameters
    ----------
    errno
        What the refused calls give: `errno.EPERM` (Docker since 2023) or `errno.ENOSYS` (Podman,
        older libseccomp profiles).
    syscalls
        System call numbers, at most 200; the default is all three of io_uring.

    Raises
    ------
    OSError
        The kernel would not take the filter.
    """
    if not 0 < len(syscalls) <= 200:
        raise ValueError(f"between 1 and 200 system calls, not {len(syscalls)}")
    code = _assemble(errno, syscalls)
    memory = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    steps = (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program)),
    )
    for option, first, second in steps:
        if libc.prctl(option, first, second, zero, zero) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl({option}) for a seccomp filter: {os.strerror(error)}")


def run_refused(
    code: str,
    errno: int,
    *,
    syscalls: Sequence[int] = IO_URING_SYSCALLS,
    environ: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run Python `code` in a fresh interpreter in which `syscalls` fail with `errno`.

    The filter is in place before `code` imports anything. Standard output and standard error come
    back as text; the exit status is not checked.
    """
    prelude = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import seccomp; seccomp.install({int(errno)}, {tuple(syscalls)!r}); del sys.path[0]\n"
    )
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=_REPOSITORY,
        env={**os.environ, **(environ or {})},
        stdin=subprocess.DEVNULL,
    )
