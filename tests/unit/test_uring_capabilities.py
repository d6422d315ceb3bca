# SPDX-License-Identifier: Apache-2.0
"""kvio.uring: what it finds out about the running kernel, also where io_uring is refused."""

from __future__ import annotations

import errno
import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvio import uring
from kvio.uring import Op, SetupFlags
from tests.support.seccomp import run_refused

SETUP, ENTER, REGISTER = 425, 426, 427
FILTERED = "a seccomp filter is on this process (Seccomp: 2 in /proc/self/status)"
SHOW = "import json\nfrom kvio import uring\nprint(json.dumps(uring.capabilities().to_dict()))\n"


def test_capabilities_agree_with_rings_made_by_hand() -> None:
    """Goal: what is reported is so. Method: make the rings again and ask them."""
    found = uring.capabilities()
    assert found.available
    assert (found.errno, found.reason) == (None, "")
    assert found.kernel == os.uname().release
    with uring.Ring(4) as ring:
        assert found.features == ring.features
        assert found.ops == ring.probe().supported
    assert Op.READ in found.ops
    for name in ("SINGLE_ISSUER", "COOP_TASKRUN", "SUBMIT_ALL", "SQE128", "CQE32"):
        if found.setup[name]:
            uring.Ring(4, flags=SetupFlags[name]).close()
        else:
            with pytest.raises(OSError, match=name):
                uring.Ring(4, flags=SetupFlags[name])
    # a flag that needs another one is refused without it, so a grant is not just "no check"
    with pytest.raises(OSError, match="DEFER_TASKRUN"):
        uring.Ring(4, flags=SetupFlags.DEFER_TASKRUN)
    assert found.register["buffers"]
    assert found.registrable_bytes == found.limit_bytes or found.memlock_bytes is not None
    assert json.loads(json.dumps(found.to_dict()))["ops"][0] == "NOP"


def test_probe_does_not_claim_operations_that_do_not_exist() -> None:
    probe = uring.probe()
    assert probe.supports(Op.READ)
    assert not probe.supports(250)
    assert probe.known <= 251
    assert uring.op_name(250) == "250"


def test_version_is_that_of_the_package_when_it_says_one() -> None:
    done = subprocess.run(
        ["pkg-config", "--modversion", "liburing"], capture_output=True, text=True, check=False
    )
    assert uring.version() in (done.stdout.strip(), "")


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_refusal_by_seccomp_is_named(error: int) -> None:
    """Goal: who refuses, exactly. Method: a real seccomp filter in a child."""
    done = run_refused(SHOW, error)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    name = errno.errorcode[error]
    assert not found["available"]
    assert found["errno"] == name
    assert found["seccomp_mode"] == 2
    assert found["reason"] == f"io_uring_setup is refused with {name}: {FILTERED}"
    assert (found["setup"], found["register"], found["ops"]) == ({}, {}, [])
    assert found["registrable_bytes"] == 0


def test_refusal_of_one_call_alone_is_told_apart() -> None:
    """Goal: a ring that can be made and not used is no ring. Method: filter enter, or register."""
    found = json.loads(run_refused(SHOW, errno.EPERM, syscalls=[ENTER]).stdout)
    assert not found["available"]
    assert found["reason"] == f"io_uring_enter is refused with EPERM: {FILTERED}"
    found = json.loads(run_refused(SHOW, errno.EPERM, syscalls=[REGISTER]).stdout)
    assert found["available"]
    assert {grant["granted"] for grant in found["register"].values()} == {False}
    assert found["register"]["buffers"]["errno"] == "EPERM"
    assert found["setup"]["SINGLE_ISSUER|DEFER_TASKRUN"]["granted"]
    assert found["registrable_bytes"] == 0


@pytest.mark.parametrize(
    ("error", "disabled", "seccomp", "privileged", "expected"),
    [
        (errno.EPERM, 2, 0, True, "kernel.io_uring_disabled is 2: off for everyone"),
        (errno.EPERM, 1, 0, False, "kernel.io_uring_disabled is 1: off without CAP_SYS_ADMIN"),
        (errno.EPERM, 1, 2, True, "EPERM: a seccomp filter"),
        (errno.EPERM, 2, 2, False, "off for everyone; a seccomp filter"),
        (errno.EPERM, 0, 0, False, "a security module (LSM) may"),
        (errno.ENOSYS, None, 0, True, "older than 5.1 or built without CONFIG_IO_URING"),
        (errno.ENOSYS, 0, 2, True, "ENOSYS: a seccomp filter"),
        (errno.ENOMEM, 0, 0, False, "ENOMEM: Cannot allocate memory"),
    ],
)
def test_every_kind_of_refusal_has_its_explanation(
    error: int, disabled: int | None, seccomp: int, privileged: bool, expected: str
) -> None:
    text = uring.explain_refusal(
        error, call="io_uring_setup", disabled=disabled, seccomp_mode=seccomp, privileged=privileged
    )
    assert expected in text


def test_sysctl_and_seccomp_are_read_below_the_given_root(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/sys/kernel/io_uring_disabled").write_text("1\n")
    (tmp_path / "proc/self/status").write_text("Name:\tx\nSeccomp:\t2\nCapEff:\t4000\n")
    found = uring.capabilities(root=str(tmp_path))
    assert (found.io_uring_disabled, found.seccomp_mode, found.ipc_lock) == (1, 2, True)


def test_registrable_bytes_stay_within_the_memlock_limit() -> None:
    """Goal: the figure is found, not computed. Method: an ordinary user with 1 MiB in a child."""
    if os.getuid() != 0:
        pytest.skip("needs root to become an ordinary user with a limit of its own")
    code = (
        "import os, resource\n"
        "from kvio import uring\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "found = uring.capabilities()\n"
        "print(found.registrable_bytes, found.memlock_bytes, found.ipc_lock)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    registrable, memlock, ipc_lock = done.stdout.split()
    # kernels before 5.12 charge the rings themselves to the same limit
    assert (1 << 20) - (64 << 10) <= int(registrable) <= 1 << 20
    assert (int(memlock), ipc_lock) == (1 << 20, "False")


def test_path_capabilities_tell_punted_reads_from_others(tmp_path: Path) -> None:
    """Goal: `punted` follows RWF_NOWAIT. Method: ext4 or the like, and tmpfs, by their own word."""
    for folder in (tmp_path, Path("/dev/shm")):
        path = folder / f"kvio-path-{os.getpid()}"
        path.write_bytes(b"x" * 8192)
        try:
            found = uring.path_capabilities(path)
            assert found.ring
            assert found.fixed
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if found.direct else 0))
            try:
                os.preadv(fd, [mmap.mmap(-1, 4096)], 0, os.RWF_NOWAIT)
                refused = False
            except OSError as error:
                refused = error.errno == errno.EOPNOTSUPP
            finally:
                os.close(fd)
            assert found.punted == refused
            assert json.loads(json.dumps(found.to_dict()))["punted"] == refused
        finally:
            path.unlink()


def test_path_that_shows_nothing_is_refused_by_name(tmp_path: Path) -> None:
    empty, fifo = tmp_path / "empty", tmp_path / "fifo"
    empty.touch()
    os.mkfifo(fifo)
    cases = [
        (empty, "it is empty"),
        (fifo, "neither a regular file nor a block device"),
        (tmp_path, "neither a regular file nor a block device"),
        (tmp_path / "none", "No such file"),
    ]
    for path, text in cases:
        with pytest.raises(OSError, match=text) as caught:
            uring.path_capabilities(path)
        assert caught.value.filename == str(path)


def test_module_exports_nothing_but_its_init_symbol() -> None:
    """Goal: two extensions cannot find each other's liburing. Method: the dynamic symbol table."""
    from kvio.uring import _liburing

    command = ["nm", "-D", "--defined-only", _liburing.__file__]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in listed.splitlines()] == ["PyInit__liburing"]
