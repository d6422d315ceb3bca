"""Reports: fio's JSON key for key, the text a person reads, the pictures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvio.cli import compare, fiojson, plot, report, tune
from kvio.cli.common import UsageError
from kvio.cli.disks import DiskUse
from kvio.cli.jobfile import Section, Setting
from kvio.cli.jobs import Job
from kvio.cli.jobspec import build_jobs
from kvio.cli.reporting import group_results
from kvio.cli.results import Direction, JobResult, Latency, MemberResult, Sample
from kvio.cli.runner import RunResult, groups_of, waves_of

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def make_job(*settings: tuple[str, str], name: str = "j", shared: int = 0) -> Job:
    values = [("filename", "/dev/a:/dev/b"), ("rw", "randrw"), ("bs", "1m"), *settings]
    section = Section(name, [Setting(key, value, "") for key, value in values], shared)
    return build_jobs([section])[0][0]


def latency(values: list[int]) -> Latency:
    edge, counts = np.unique(np.array(values, np.int64), return_counts=True)
    return Latency(edge, counts, len(values), min(values), max(values), float(sum(values)),
                   float(sum(v * v for v in values)))  # fmt: skip


def make_result(name: str = "j", group: int = 0, *, writes: bool = True) -> JobResult:
    times = latency([900, 1_500, 7_000_000, 8_000_000, 3_000_000_000])
    members = [
        MemberResult("/dev/a", "io_uring", "reads are not punted", True, 3 << 30, 1 << 30, 3000,
                     1000, 0, 0, 8_000_000, 9_000_000),
        MemberResult("/dev/b", "threads", "reads are punted", True, 1 << 30, 1 << 30, 1000, 1000,
                     1, 2, 99_000_000, 9_000_000),
    ]  # fmt: skip
    return JobResult(
        name, group, read=Direction(4000, 4 << 30, 0, 0, 2.0, times),
        write=Direction(2000, 2 << 30, 1, 1, 2.0, times) if writes else Direction(),
        members=members, started_s=50.0, elapsed_s=2.0, usr_s=0.2, sys_s=0.4, iodepth=32,
        context_switches=123, engine="mixed", capabilities={"setup_flags": ["SINGLE_ISSUER"],
        "registered_files": True, "regions": 1, "register_refused": "ENOMEM: the limit is 8 MiB"},
        counters={"fixed_ops": 75, "unfixed_ops": 25, "bounced": 3, "retries": 2},
        buffers="registered pool", hugepages="thp",
        samples=[Sample(50.5 + i / 2, 0.5, 1 << 30, 1 << 29, 1000, 500, 30) for i in range(4)],
    )  # fmt: skip


def document(job: Job, *, bins: bool = False) -> dict[str, Any]:
    run = RunResult([make_result()], [job], disks=[DiskUse("vda", 1, 2, 0, 0, 3, 4, 5, 6.0)])
    found = fiojson.report_json(run, [(job, make_result())], version="9", notes=["n"], bins=bins)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def shape(value: Any) -> Any:
    """The keys of nested dicts in order; tables of measured values count as one leaf."""
    if isinstance(value, dict):
        return {
            key: "table"
            if key in ("percentile", "bins", "job options", "global options")
            else shape(part)
            for key, part in value.items()
        }
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "text" if isinstance(value, str) else "number"


def fio_document(folder: Path, kind: str, job_file: str | None = None) -> dict[str, Any]:
    command = ["fio", f"--output-format={kind}", "--output=out.json"]
    if job_file is None:
        command += ["--name=j", "--rw=randrw", "--bs=64k", "--size=2m", "--filename=f",
                    "--ioengine=psync"]  # fmt: skip
    else:
        (folder / "job.fio").write_text(job_file)
        command.append("job.fio")
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return json.loads((folder / "out.json").read_text())  # type: ignore[no-any-return]


@needs_fio
@pytest.mark.parametrize("kind", ["json", "json+"])
def test_json_has_the_keys_of_fio_in_its_order(tmp_path: Path, kind: str) -> None:
    # Goal: whatever reads fio's report reads this one. Method: a real fio, field by field.
    theirs, ours = (
        fio_document(tmp_path, kind),
        document(make_job(("name", "j")), bins=kind == "json+"),
    )
    own = ours.pop("kvio")
    assert own["version"] == "9"
    assert list(ours) == list(theirs)
    assert shape(ours) == shape(theirs)
    for key, value in theirs["jobs"][0].items():
        assert list(ours["jobs"][0]) == list(theirs["jobs"][0])
        if key.startswith(("latency_", "iodepth_")) and isinstance(value, dict):
            assert list(ours["jobs"][0][key]) == list(value), key
    assert list(ours["jobs"][0]["read"]) == list(theirs["jobs"][0]["read"])
    assert list(ours["jobs"][0]["read"]["clat_ns"]["percentile"]) == list(
        theirs["jobs"][0]["read"]["clat_ns"]["percentile"]
    )


@needs_fio
def test_json_of_a_job_file_has_the_global_options_of_fio(tmp_path: Path) -> None:
    text = (
        "[global]\nbs=64k\nioengine=psync\n"
        "[j]\nsize=1m\nfilename=f\nrw=read\ndescription=some words\n"
    )
    theirs = fio_document(tmp_path, "json", text)
    values = [("bs", "64k"), ("filename", "f"), ("rw", "read"), ("description", "some words")]
    job = build_jobs([Section("j", [Setting(k, v, "") for k, v in values], 1)])[0][0]
    ours = document(job)
    ours.pop("kvio")
    assert list(ours) == list(theirs)
    assert ours["global options"] == {"bs": "64k"}
    assert list(ours["jobs"][0]) == list(theirs["jobs"][0])


def test_a_missing_key_would_be_noticed() -> None:
    # The mutant for the comparison above.
    one, two = document(make_job()), document(make_job())
    del two["jobs"][0]["read"]["clat_ns"]["stddev"]
    assert shape(one) != shape(two)


def test_json_values() -> None:
    found = document(make_job())
    job = found["jobs"][0]
    read = job["read"]
    assert read["io_bytes"] == 4 << 30
    assert read["bw_bytes"] == 2 << 30
    assert read["bw"] == 2 << 20
    assert read["iops"] == 2000
    assert read["runtime"] == 2000
    assert (read["bw_samples"], read["bw_mean"], read["bw_dev"]) == (4, 2 << 20, 0)
    assert (read["iops_min"], read["iops_max"]) == (2000, 2000)
    assert read["clat_ns"]["N"] == 5
    assert read["clat_ns"]["percentile"]["50.000000"] == 7_000_000
    assert read["slat_ns"]["N"] == 0
    assert job["usr_cpu"] == 10.0
    assert job["sys_cpu"] == 20.0
    assert job["iodepth_level"]["16"] == 100.0
    assert sum(
        sum(job[f"latency_{unit}"].values()) for unit in ("ns", "us", "ms")
    ) == pytest.approx(100)
    assert job["latency_ms"][">=2000"] == 20.0
    assert job["latency_ms"]["10"] == 40.0
    assert job["latency_us"]["2"] == 20.0
    own = found["kvio"]["jobs"][0]
    assert own["members"][0]["read_bw_bytes"] == 3 << 29
    assert own["errors"]["write"] == 1
    assert own["cpu_seconds_per_gb"] == pytest.approx(0.6 / (6 * 1.073741824), rel=1e-3)


def test_text_begins_with_what_a_person_looks_for() -> None:
    text = report.report_text(
        [(make_job(), make_result())], notes=["something"], failures=["worse"]
    )
    lines = text.splitlines()
    assert lines[0] == "j: randrw 1 MiB, depth 1, 50 % reads, 2 member(s)"
    assert lines[1].startswith("  read   2.15 GB/s    2000 IOPS   p50 7 ms  p99 3 s")
    assert "/dev/a" in lines[2]
    assert "75.0 %" in lines[2]
    assert "/dev/b" in lines[3]
    assert "1 error(s), 2 retried" in lines[3]
    assert lines[4].startswith("  write")
    assert "1 ERROR(S)" in lines[4]
    for words in ("io_uring on 1 of 2 member(s), O_DIRECT on: reads are not punted",
                  "threads on 1 of 2 member(s)", "setup_flags: SINGLE_ISSUER", "registered_files",
                  "register: ENOMEM: the limit is 8 MiB", "75 % of I/O on registered buffers",
                  "3 bounced", "2 retries", "s per GB", "note: something",
                  "failed: worse"):  # fmt: skip
        assert words in text


def test_text_of_many_members_shows_the_slowest() -> None:
    result = make_result()
    result.members = [
        MemberResult(f"/dev/m{i}", "io_uring", "", True, 1 << 20, 0, 1, read_p99_ns=i * 1000)
        for i in range(20)
    ]
    text = report.report_text([(make_job(), result)], notes=[], failures=[])
    assert "/dev/m19" in text
    assert "/dev/m0 " not in text
    assert "and 12 member(s) with lower p99 latency" in text


def test_groups_and_waves() -> None:
    jobs = [make_job(name="a"), make_job(("new_group", "1"), name="b"),
            make_job(("stonewall", "1"), name="c"), make_job(name="d")]  # fmt: skip
    assert groups_of(jobs) == [0, 1, 2, 2]
    assert waves_of(jobs) == [[0, 1], [2, 3]]


def test_group_reporting_merges_the_copies_of_a_group_only() -> None:
    merged = make_job(("group_reporting", "1"), name="m")
    single = make_job(name="s")
    run = RunResult(
        [make_result("m", 0), make_result("s", 0), make_result("m", 0), make_result("m", 1)],
        [merged, single, merged, merged],
    )
    assert [(r.name, r.group, r.copies) for _, r in group_results(run)] == [
        ("m", 0, 2), ("s", 0, 1), ("m", 1, 1),
    ]  # fmt: skip


def test_exit_codes() -> None:
    assert RunResult([make_result(writes=False)], [make_job()]).exit_code == 0
    assert RunResult([make_result()], [make_job()]).exit_code == 1  # it has a write error
    assert RunResult(failures=[("usage", "x")]).exit_code == 2
    assert RunResult(failures=[("io", "x")]).exit_code == 1
    assert RunResult(failures=[("io", "x")], interrupted=True).exit_code == 130


@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_plots_are_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    target = tmp_path / f"p.{suffix}"
    plot.check_target(str(target))
    plot.draw_bench(
        [(make_job(), make_result()), (make_job(name="k"), make_result("k"))], str(target)
    )
    head = target.read_bytes()
    assert len(head) > 10_000
    if suffix == "png":
        assert head.startswith(b"\x89PNG")
    else:
        text = head.decode()
        assert "<svg" in text
        assert "Latency percentiles" in text or "<path" in text
        for outside in ('src="http', 'href="http', "<script", "@import", "url(http"):
            assert outside not in text


def test_a_plot_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"does not end in"):
        plot.check_target("x.pdf")
    with pytest.raises(UsageError, match="no such directory"):
        plot.check_target(str(tmp_path / "nope" / "x.png"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="plot needs matplotlib"):
        plot.check_target(str(tmp_path / "x.png"))


def point(block: int, depth: int, bw: float, p99: int) -> tune.Point:
    return tune.Point("auto", block, depth, bw, bw / block, p99 // 2, p99, 0.05)


def test_tune_recommends_the_lowest_latency_among_the_fastest() -> None:
    points = [point(65536, 1, 1e9, 100), point(65536, 16, 3.9e9, 300), point(1 << 20, 16, 4e9, 900),
              point(1 << 20, 64, 3.95e9, 3000)]  # fmt: skip
    found = tune.recommend(points)
    assert (found.point.block_bytes, found.point.iodepth) == (65536, 16)
    assert "within 3 % of the highest bandwidth (4.00 GB/s at 1 MiB, depth 16" in found.reason
    table = tune.sweep_table(points).splitlines()
    assert len(table) == 5
    assert "3.90 GB/s" in table[2]


def test_tune_says_when_the_sweep_ended_too_early() -> None:
    found = tune.recommend([point(65536, 1, 1e9, 100), point(65536, 16, 4e9, 300)])
    assert "try deeper" in found.reason


def test_tune_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")
    points = [point(b, d, 1e9 * d, 1000 * d) for b in (4096, 65536) for d in (1, 8)]
    plot.draw_tune(points, tune.recommend(points), str(tmp_path / "t.png"), title="x")
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_the_job_for_fio_does_the_same_work() -> None:
    job = make_job(("iodepth", "16"), ("size", "64m"), ("offset", "8m"), ("runtime", "5"),
                   ("time_based", "1"), ("fixedbufs", "1"), ("rwmixread", "70"))  # fmt: skip
    lines = compare.fio_job(job, direct=True).splitlines()
    assert lines[0] == "[j]"
    for line in ("filename=/dev/a:/dev/b", "file_service_type=roundrobin", "rw=randrw", "bs=1m",
                 "iodepth=16", "ioengine=io_uring", "direct=1", "size=67108864", "offset=4194304",
                 "runtime=5", "time_based=1", "fixedbufs=1", "rwmixread=70"):  # fmt: skip
        assert line in lines


def test_comparison_figures() -> None:
    comparison = compare.Comparison("job", "fio-3.33")
    for ours, theirs in ((2e9, 1e9), (3e9, 2e9), (4e9, 4e9)):
        read = compare.Figures(ours, 1, 1000, 2000)
        none = compare.Figures(0, 0, 0, 0)
        comparison.kvio.append(compare.Side(read, none, 0.05))
        comparison.fio.append(compare.Side(compare.Figures(theirs, 1, 1500, 4000), none, 0.10))
    assert comparison.ratios("read") == [2.0, 1.5, 1.0]
    text = comparison.text()
    assert "kvio 3.00 GB/s, fio 2.00 GB/s: ratio 1.50 (1.00 to 2.00)" in text
    assert "write" not in text
    assert "ratio 0.50" in text
    assert comparison.to_dict()["ratio"] == {"read": 1.5}


@needs_fio
def test_fio_runs_the_job_and_its_figures_are_read(tmp_path: Path) -> None:
    member = tmp_path / "m"
    member.write_bytes(bytes(1 << 20))
    values = (("filename", str(member)), ("rw", "read"), ("bs", "64k"), ("ioengine", "psync"))
    job = build_jobs([Section("j", [Setting(k, v, "") for k, v in values])])[0][0]
    run = compare.run_fio(compare.fio_job(job, direct=False))
    assert run.document["fio version"].startswith("fio-")
    assert run.cpu_s > 0
    side = compare.fio_side(run, ramp_s=0.0)
    assert side.read.bw_bytes > 0
    assert side.read.p99_ns >= side.read.p50_ns > 0
    assert side.write.bw_bytes == 0
