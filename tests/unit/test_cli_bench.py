"""`kvio bench` as a person runs it: the real engine, real files and devices, real signals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvio.cli.main import main
from kvio.testing import LoopDevices

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="loop and FUSE devices need root")


def kvio(folder: Path, *words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvio", *words], cwd=folder, capture_output=True, text=True,
        timeout=timeout, check=False, env=environment(),
    )  # fmt: skip


def environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}


def bench(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Run in this process (its jobs are forked from it): starting Python each time is slow."""
    with contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()) as said:
        found = main(["bench", *words, "--output-format=json", "--output=out.json"])
    assert found == code, said.getvalue()
    return json.loads((folder / "out.json").read_text())  # type: ignore[no-any-return]


FOUR = "--filename=a:b:c:d"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with four members of 16 MiB."""
    folder = tmp_path_factory.mktemp("members")
    done = kvio(folder, "bench", FOUR, "--size=64m", "--create_only=1")
    assert done.returncode == 0, done.stderr
    assert "made 4 member(s) of 16 MiB" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == list("abcd")
    return folder


def test_a_read_moves_its_size_over_all_members(members: Path) -> None:
    found = bench(members, FOUR, "--rw=read", "--bs=256k", "--iodepth=8")
    read, own = found["jobs"][0]["read"], found["kvio"]["jobs"][0]
    assert (read["io_bytes"], read["total_ios"], read["short_ios"]) == (64 << 20, 256, 0)
    assert read["clat_ns"]["N"] == 256
    assert read["bw_bytes"] > 0
    assert 0 < read["clat_ns"]["min"] <= read["clat_ns"]["percentile"]["50.000000"]
    assert [member["read_bytes"] for member in own["members"]] == [16 << 20] * 4
    assert found["jobs"][0]["write"]["total_ios"] == 0
    assert own["cpu_seconds"] > 0


def test_random_reads_visit_every_block_once(members: Path) -> None:
    found = bench(members, FOUR, "--rw=randread", "--bs=64k", "--iodepth=16", "--loops=2")
    assert found["jobs"][0]["read"]["total_ios"] == 2048
    shares = [member["read_ios"] for member in found["kvio"]["jobs"][0]["members"]]
    assert shares == [512] * 4


@pytest.mark.parametrize(
    ("words", "ios"),
    [
        (["--size=8m"], 128),
        (["--size=50%"], 512),
        (["--size=8m", "--offset=4m"], 128),
        (["--offset=75%"], 256),
        (["--size=8m", "--io_size=24m"], 384),
        (["--size=8m", "--io_size=50%"], 64),
        (["--number_ios=10"], 10),
        (["--size=1m", "--loops=5"], 80),
        (["--size=8m", "--numjobs=2", "--offset_increment=8m", "--group_reporting"], 256),
    ],
)
def test_amounts(members: Path, words: list[str], ios: int) -> None:
    found = bench(members, FOUR, "--rw=randread", "--bs=64k", "--iodepth=4", *words)
    assert found["jobs"][0]["read"]["total_ios"] == ios


def test_copies_are_reported_apart_unless_grouped(members: Path) -> None:
    words = [FOUR, "--rw=read", "--bs=256k", "--iodepth=4", "--numjobs=3"]
    assert len(bench(members, *words)["jobs"]) == 3
    grouped = bench(members, *words, "--group_reporting")
    assert len(grouped["jobs"]) == 1
    assert grouped["jobs"][0]["read"]["io_bytes"] == 3 * (64 << 20)
    threads = bench(members, *words, "--thread", "--group_reporting")
    assert threads["jobs"][0]["read"]["io_bytes"] == 3 * (64 << 20)


def test_time_ramp_and_samples(members: Path) -> None:
    begun = time.monotonic()
    found = bench(members, FOUR, "--rw=randread", "--bs=64k", "--iodepth=8", "--runtime=1",
                  "--time_based", "--ramp_time=500ms", "--bwavgtime=250")  # fmt: skip
    elapsed = time.monotonic() - begun
    read = found["jobs"][0]["read"]
    assert elapsed > 1.5
    assert 1000 <= read["runtime"] < 2000
    assert read["bw_samples"] >= 2
    assert read["bw_min"] <= read["bw_mean"] <= read["bw_max"]
    samples = found["kvio"]["jobs"][0]["samples"]
    assert sum(sample["read_bytes"] for sample in samples) <= read["io_bytes"] * 1.1


def test_rates_are_kept(members: Path) -> None:
    found = bench(members, FOUR, "--rw=randread", "--bs=64k", "--iodepth=8", "--runtime=2",
                  "--time_based", "--rate=8m")  # fmt: skip
    assert found["jobs"][0]["read"]["bw_bytes"] == pytest.approx(8 << 20, rel=0.15)


def test_a_mix_keeps_its_share(members: Path) -> None:
    found = bench(members, FOUR, "--rw=randrw", "--rwmixread=75", "--bs=64k", "--iodepth=8")
    read, write = (found["jobs"][0][word]["total_ios"] for word in ("read", "write"))
    assert read + write == 1024
    assert read == pytest.approx(768, abs=8)  # one batch


@pytest.mark.parametrize("rw", ["write", "randwrite", "randrw"])
@pytest.mark.parametrize(
    "extra", [[], ["--fixedbufs", "--verify_interval=4k"], ["--engine=threads"]]
)
def test_verify_reads_back_what_was_written(members: Path, rw: str, extra: list[str]) -> None:
    found = bench(members, FOUR, f"--rw={rw}", "--bs=64k", "--iodepth=8", "--verify=crc32", *extra)
    checked, written = found["kvio"]["jobs"][0]["verify"], found["jobs"][0]["write"]["total_ios"]
    assert checked == {"checked": written, "bad": 0}
    assert written >= 500


def test_verify_finds_what_changed_behind_its_back(members: Path) -> None:
    words = [FOUR, "--rw=write", "--bs=64k", "--iodepth=8", "--verify=md5"]
    bench(members, *words)
    assert bench(members, *words, "--verify_only", "--readonly")["kvio"]["jobs"][0]["verify"] == {
        "checked": 1024, "bad": 0,
    }  # fmt: skip
    fd = os.open(members / "b", os.O_RDWR)
    at = 3 * (1 << 20) + 70_000
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)  # one flipped bit
    moved = os.pread(fd, 65536, 0)
    os.pwrite(fd, moved, 65536)  # one misplaced block
    os.fsync(fd)
    os.close(fd)
    done = kvio(members, "bench", FOUR, "--rw=read", "--bs=64k", "--iodepth=8", "--verify=md5")
    assert done.returncode == 1
    assert "2 BAD" in done.stdout
    assert "md5 does not match" in done.stdout
    assert f"misplaced: this is the block of offset {1 << 20}" in done.stdout
    fatal = bench(members, *words, "--verify_only", "--verify_fatal", "--iodepth=1", code=1)
    assert fatal["kvio"]["jobs"][0]["verify"]["bad"] == 1


def test_interval_headers_are_checked_with_another_block_size(members: Path) -> None:
    bench(members, FOUR, "--rw=write", "--bs=256k", "--verify=crc32", "--verify_interval=64k")
    found = bench(members, FOUR, "--rw=randread", "--bs=128k", "--verify=crc32",
                  "--verify_interval=64k", "--iodepth=4")  # fmt: skip
    assert found["kvio"]["jobs"][0]["verify"] == {"checked": 512, "bad": 0}


def test_job_file_with_stonewall_runs_one_after_the_other(members: Path) -> None:
    (members / "j.fio").write_text(
        "[global]\nfilename=${MEMBERS}\nbs=256k\niodepth=4\n"
        "[first]\nrw=write\nsize=8m\n[second]\nstonewall\nrw=read\nsize=16m\n"
    )
    os.environ["MEMBERS"] = "a:b:c:d"
    try:
        found = bench(members, "j.fio")
    finally:
        del os.environ["MEMBERS"]
    assert [(job["jobname"], job["groupid"]) for job in found["jobs"]] == [
        ("first", 0),
        ("second", 1),
    ]
    assert found["jobs"][0]["write"]["io_bytes"] == 8 << 20
    assert found["jobs"][1]["read"]["io_bytes"] == 16 << 20
    assert found["global options"]["bs"] == "256k"


def test_what_was_granted_is_reported(members: Path) -> None:
    done = kvio(members, "bench", FOUR, "--rw=read", "--bs=1m", "--iodepth=8", "--fixedbufs")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert re.match(r"  read +[\d.]+ [MG]B/s +\d+ IOPS   p50 .* p99 .*", lines[1])
    assert "25.0 %" in lines[2]
    assert "engine   " in done.stdout
    assert "registered pool" in done.stdout
    assert "s per GB" in done.stdout


def test_plot_and_tune(members: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    done = kvio(members, "bench", FOUR, "--rw=read", "--bs=1m", "--plot=run.svg")
    assert done.returncode == 0
    assert (members / "run.svg").read_text().lstrip().startswith("<?xml")
    done = kvio(members, "tune", "a:b:c:d", "--bs=64k,1m", "--iodepth=1,8", "--runtime=100ms",
                "--json", "--plot=tune.png")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["points"]) == 4
    assert found["recommendation"]["command"].startswith("kvio bench --filename=a:b:c:d")
    assert (members / "tune.png").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["bench", "--foo"], 2, "unknown option --foo"),
        (["bench"], 2, "nothing to do"),
        (["bench", FOUR, "--size=1t"], 2, "more than the volume holds"),
        (["bench", FOUR, "--size=4k", "--bs=64k"], 2, "holds no block"),
        (["bench", FOUR, "--rw=write", "--bs=512"], 2, "bs=512 is not a multiple of"),
        (["bench", FOUR, "--rw=write", "--offset=100", "--size=1m"], 2, "offset=100 is not"),
        (["bench", FOUR, "--rw=write", "--readonly"], 2, "--readonly forbids"),
        (["bench", "--filename=/dev/kvio-nope"], 1, "no such device"),
        (["bench", "--filename=/"], 1, "/"),
        (["bench", FOUR, "--output=no/such/file"], 1, "cannot write"),
        (["bench", FOUR, "--compare-fio", "--verify=md5"], 2, "cannot compare"),
        (["bench", FOUR, "--stripe-unit=512"], 2, "job kvio"),
        (["tune"], 2, "required: member"),
        (["tune", "a", "--bs="], 2, "empty list"),
        (["info", "/dev/kvio-nope"], 1, "/dev/kvio-nope"),
        (["info", "/etc/passwd"], 1, "not a device"),
        (["frob"], 2, "frob"),
        ([], 2, "a command is needed"),
    ],
)
def test_mistakes_get_one_line(
    members: Path, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.chdir(members):
        assert main(words) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("kvio: ")
    assert len(said.err.strip().splitlines()) == 1
    assert said.out == ""


def test_a_mistake_on_the_real_command_line(members: Path) -> None:
    done = kvio(members, "bench", FOUR, "--size=1t")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"kvio: .* more than the volume holds .*\n", done.stderr)


def test_help_and_version(tmp_path: Path) -> None:
    for words in (["--help"], ["bench", "--help"], ["tune", "--help"], ["info", "--help"]):
        done = kvio(tmp_path, *words)
        assert done.returncode == 0
        assert done.stdout.startswith("usage: kvio")
    assert (
        "kvio 0." in kvio(tmp_path, "--version").stdout
        or "unknown" in kvio(tmp_path, "--version").stdout
    )


def start(folder: Path, *words: str, **kind: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen([sys.executable, "-m", "kvio", "bench", *words], cwd=folder,
                            env=environment(), **kind)  # fmt: skip


@pytest.mark.parametrize("extra", [[], ["--numjobs=2", "--group_reporting"], ["--thread"]])
def test_interrupt_gives_a_partial_report(members: Path, extra: list[str]) -> None:
    process = start(members, FOUR, "--rw=randread", "--bs=64k", "--iodepth=8", "--runtime=60",
                    "--time_based", *extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True)  # fmt: skip
    try:
        wait_for_reads(process.pid, 64 << 20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "(interrupted, partial)" in out
    assert re.search(r"read +[\d.]+ [MG]B/s", out)
    assert "Traceback" not in err


def wait_for_reads(pid: int, nbytes: int) -> None:
    """Until the process and its children have read that much from storage."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        total = 0
        for child in [pid, *children(pid)]:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{child}/io").read_text()
                total += int(re.search(r"^read_bytes: (\d+)", text, re.M)[1])  # type: ignore[index]
        if total >= nbytes:
            return
        time.sleep(0.02)
    raise AssertionError("the jobs did not start to read")


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def test_a_closed_pipe_ends_quietly(members: Path) -> None:
    reader, writer = os.pipe()
    process = start(members, FOUR, "--rw=read", "--bs=1m", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    os.close(reader)
    _, err = process.communicate(timeout=30)
    assert err == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_progress_is_shown_on_a_terminal_only(members: Path) -> None:
    words = [FOUR, "--rw=randread", "--bs=64k", "--iodepth=4", "--runtime=2", "--time_based",
             "--output=report.txt"]  # fmt: skip
    ours, theirs = pty.openpty()
    process = start(members, *words, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    end = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 65536)
            except OSError:
                break
    os.close(ours)
    assert process.wait(timeout=10) == 0
    assert b"IOPS" in shown
    assert b"ETA" in shown
    assert kvio(members, "bench", *words).stderr == ""


@needs_root
def test_writers_of_a_block_device_share_one_volume() -> None:
    with LoopDevices(2, 32 << 20) as loops:
        folder = Path("/")
        done = kvio(folder, "bench", f"--filename={':'.join(loops.paths)}", "--rw=randwrite",
                    "--bs=64k", "--iodepth=4", "--numjobs=4", "--size=16m",
                    "--offset_increment=16m", "--verify=crc32", "--output-format=json")  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert len(found["jobs"]) == 1
        assert found["kvio"]["jobs"][0]["copies"] == 4
        assert found["jobs"][0]["write"]["io_bytes"] == 64 << 20
        assert found["kvio"]["jobs"][0]["verify"] == {"checked": 1024, "bad": 0}
        again = kvio(folder, "bench", f"--filename={loops.paths[0]}", "--rw=write", "--bs=64k")
        assert again.returncode == 1
        assert "refusing to write" in again.stderr
