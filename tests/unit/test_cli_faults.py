"""`kvio bench` on a device that fails and stalls: what it reports and when it gives up."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvio.cli.main import main
from tests.support.faultdev import FaultDevice

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="loop and FUSE devices need root")


def bench(folder: Path, *words: str, code: int) -> dict[str, Any]:
    with contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()) as said:
        found = main(["bench", *words, "--output-format=json", "--output=out.json"])
    assert found == code, said.getvalue()
    return json.loads((folder / "out.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture
def faulty() -> Iterator[FaultDevice]:
    with FaultDevice(64 << 20) as device:
        yield device


READ_32M = ["--rw=read", "--bs=64k", "--iodepth=8", "--size=32m"]


@needs_root
def test_an_io_error_ends_the_job_and_names_the_place(tmp_path: Path, faulty: FaultDevice) -> None:
    faulty.fail("read", offset=8 << 20, length=4096)
    # a minute, unless something ends it: how many reads overtake the bad one is the kernel's affair
    words = [*READ_32M, "--time_based", "--runtime=60"]
    found = bench(tmp_path, f"--filename={faulty.device}", *words, code=1)
    job, own = found["jobs"][0], found["kvio"]["jobs"][0]
    assert job["error"] == errno.EIO
    assert job["job_runtime"] < 55_000
    assert any(f"of {faulty.device}" in text for text in own["errors"]["messages"])
    on = bench(tmp_path, f"--filename={faulty.device}", *READ_32M, "--continue_on_error=io", code=1)
    assert on["jobs"][0]["read"]["total_ios"] == 512
    assert on["kvio"]["jobs"][0]["errors"]["read"] >= 1


@needs_root
def test_a_stalled_member_ends_with_its_deadline(tmp_path: Path, faulty: FaultDevice) -> None:
    stall = faulty.stall("read", offset=8 << 20, length=4096)
    found = bench(tmp_path, f"--filename={faulty.device}", *READ_32M, "--deadline=500ms", code=1)
    stall.release()
    own = found["kvio"]["jobs"][0]
    assert found["jobs"][0]["error"] == errno.ETIME
    assert own["counters"]["deadline_exceeded"] >= 1
    assert any("deadline" in text for text in own["errors"]["messages"])


@needs_root
def test_a_second_interrupt_does_not_wait_for_a_stalled_member(
    tmp_path: Path, faulty: FaultDevice
) -> None:
    stall = faulty.stall("read", offset=8 << 20, length=4096)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvio", "bench", f"--filename={faulty.device}", *READ_32M],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        faulty.wait_stalled()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "interrupt again to give up" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        stall.release()
    assert process.returncode == 130
    assert "gave up waiting" in err
