# SPDX-License-Identifier: Apache-2.0
"""liburing for Python: rings, requests, completions, registration, and what the kernel grants.

>>> with Ring(8) as ring:
...     _ = ring.prep_nop(user_data="hello")
...     _ = ring.submit_and_wait(1)
...     ring.wait_cqe().user_data
'hello'

Every call into liburing releases the GIL, the short ones included. Errors are `OSError` with the
kernel's errno.
"""

from __future__ import annotations

from kvio.uring._capabilities import Capabilities, capabilities, explain_refusal
from kvio.uring._constants import (
    AT_FDCWD,
    CancelFlags,
    CqeFlags,
    Features,
    Op,
    RegisterOp,
    SetupFlags,
    SqeFlags,
    TimeoutFlags,
)
from kvio.uring._grants import Grant, PathCapabilities, path_capabilities
from kvio.uring._memory import STATX_SIZE, StatxResult, address_of
from kvio.uring._register import Probe, Ring, op_name, probe
from kvio.uring._types import Cqe, version

__all__ = [
    "AT_FDCWD",
    "STATX_SIZE",
    "CancelFlags",
    "Capabilities",
    "Cqe",
    "CqeFlags",
    "Features",
    "Grant",
    "Op",
    "PathCapabilities",
    "Probe",
    "RegisterOp",
    "Ring",
    "SetupFlags",
    "SqeFlags",
    "StatxResult",
    "TimeoutFlags",
    "address_of",
    "capabilities",
    "explain_refusal",
    "op_name",
    "path_capabilities",
    "probe",
    "version",
]
