# SPDX-License-Identifier: Apache-2.0
"""Why kvio is not as fast or as safe here as it could be, and the command that changes it.

Each check looks at one thing and says what it found as a `Finding` with a remedy. Nothing is
changed; devices named by the caller are read (4 KiB), and in directories a small file is made for
the moment.

>>> import kvio.diagnose
>>> for finding in kvio.diagnose.diagnose():  # doctest: +SKIP
...     print(finding.severity, finding.title, finding.remedy)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence

from kvio.diagnose._finding import Finding, Host, Severity, worst
from kvio.diagnose._memory import check_hugetlb, check_transparent
from kvio.diagnose._storage import check_device, check_member, check_namespaces, check_path
from kvio.diagnose._system import (
    check_container,
    check_core,
    check_cpus,
    check_io_uring,
    check_kernel,
    check_nofile,
    check_numa,
    check_programs,
    check_registration,
    check_seccomp,
)

__all__ = [
    "Finding",
    "Host",
    "Severity",
    "check_device",
    "check_path",
    "diagnose",
    "diagnose_host",
    "worst",
]

_HOST_CHECKS = (
    check_kernel,
    check_core,
    check_io_uring,
    check_registration,
    check_seccomp,
    check_nofile,
    check_container,
    check_cpus,
    check_numa,
    check_hugetlb,
    check_transparent,
    check_programs,
)


def diagnose_host(host: Host) -> list[Finding]:
    """The checks that concern no particular device."""
    return [finding for check in _HOST_CHECKS for finding in check(host)]


def diagnose(
    members: Sequence[str | os.PathLike[str]] = (),
    *,
    root: str | os.PathLike[str] = "/",
    need_bytes: int = 1 << 30,
) -> list[Finding]:
    """Look at this machine, and at the paths that are to be members.

    Parameters
    ----------
    members
        Block devices, files, or directories for files. Without any, every NVMe namespace is
        looked at (its settings, no reads) and the directory for temporary files is tried.
    root
        Prefix of what is read of /proc and /sys, for tests. System calls and members are real.
    need_bytes
        How much memory is to be registered: the size of the buffer pools.

    Returns
    -------
    list of Finding
        In the order of the checks; `worst` gives the gravest severity.
    """
    host = Host.live(root=root, need_bytes=need_bytes)
    findings = diagnose_host(host)
    for member in members:
        findings += check_member(host, os.fspath(member))
    if not members:
        findings += check_namespaces(host)
        findings += check_path(tempfile.gettempdir(), given=False)
    return findings
