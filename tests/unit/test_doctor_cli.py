# SPDX-License-Identifier: Apache-2.0
"""`kvio doctor` as a person and as a script see it, also where io_uring is refused."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvio.cli import doctor
from kvio.diagnose import Finding, Severity
from tests.support.seccomp import run_refused

REPOSITORY = Path(__file__).resolve().parents[2]
FILTERED = "a seccomp filter is on this process (Seccomp: 2 in /proc/self/status)"
DOCTOR = "import sys; from kvio.cli.main import main; sys.exit(main(['doctor', *{args!r}]))"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvio", "doctor", *args]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=60
    )


def test_pipe_gets_plain_lines_and_a_count(tmp_path: Path) -> None:
    (tmp_path / "member").write_bytes(b"x" * 8192)
    done = run("--pool-size", "1m", str(tmp_path / "member"))
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"(\d+ (ok|info|warn|fail)(, )?)+", lines[-1])
    heads = [line for line in lines[:-1] if not line.startswith(" ")]
    assert all(re.match(r"(ok   |info |warn |fail ) \S+: ", line) for line in heads)
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", lines[-1])}
    assert sum(counts.values()) == len(heads)
    assert "\x1b" not in done.stdout
    assert done.returncode == (1 if "fail" in counts else 0)


def test_json_has_every_field_of_every_finding(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "none"))
    report = json.loads(done.stdout)
    assert report["worst"] == "fail"
    assert done.returncode == 1
    for finding in report["findings"]:
        assert set(finding) == {"id", "severity", "title", "detail", "remedy"}
        assert finding["severity"] in {"ok", "info", "warn", "fail"}
    (last,) = [f for f in report["findings"] if f["id"] == f"read:{tmp_path / 'none'}"]
    assert "No such file" in last["title"]


def test_terminal_gets_a_table_with_colours(tmp_path: Path) -> None:
    """Goal: what a person sees. Method: a pseudo terminal of 100 columns."""
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvio", "doctor", str(tmp_path)],
        stdout=writer, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(writer)
    shown = b""
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # the terminal's other end is gone
            break
        if not chunk:
            break
        shown += chunk
    os.close(reader)
    _, errors = process.communicate(timeout=60)
    assert errors == b""
    assert b"\x1b[32mok" in shown
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "io_uring is granted" in text or "io_uring_setup is refused" in text


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_refused_io_uring_is_said_with_its_cause_and_fails(error: int, tmp_path: Path) -> None:
    """Goal: the message that a person in a container needs. Method: a real seccomp filter."""
    name = errno.errorcode[error]
    done = run_refused(DOCTOR.format(args=[str(tmp_path)]), error)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert f"fail  io_uring: io_uring_setup is refused with {name}: {FILTERED}\n" in done.stdout
    assert "remedy: docker, podman: --security-opt seccomp=" in done.stdout
    assert "limits.memlock" not in done.stdout  # registration means nothing without a ring
    assert f"direct:{tmp_path}" in done.stdout  # the other checks go on
    report = json.loads(run_refused(DOCTOR.format(args=["--json"]), error).stdout)
    found = {finding["id"]: finding for finding in report["findings"]}
    assert found["seccomp"]["severity"] == "info"
    assert found["io_uring"]["severity"] == "fail"


def test_bad_size_is_a_usage_error() -> None:
    done = run("--pool-size", "lots")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvio: 'lots' is not a size")
    assert done.stderr.count("\n") == 1


def test_only_a_failure_changes_the_exit_code() -> None:
    """Goal: plain() and summary(). Method: findings of each severity, formatted."""
    findings = [
        Finding("a", Severity.OK, "good"),
        Finding("b", Severity.WARN, "slow", "because", "do this"),
    ]
    assert doctor.plain(findings) == (
        "ok    a: good\nwarn  b: slow\n      because\n      remedy: do this\n1 ok, 1 warn"
    )
    assert doctor.summary([]) == ""
