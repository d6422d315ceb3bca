"""The command line: every option of fio has a known fate, and mistakes are named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvio.cli import bench, options
from kvio.cli.common import UsageError
from kvio.cli.fio_only import NOTED, REFUSED
from kvio.cli.jobs import Job
from kvio.cli.jobspec import build_jobs


def jobs_of(*words: str, readonly: bool = False) -> tuple[list[Job], list[str]]:
    """Parse a command line as `kvio bench` does, up to the jobs."""
    import argparse

    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    argv, notes = bench.split_notes(bench.normalize(words))
    args = parser.parse_args(["bench", *argv])
    run, given = bench.take_run_options(getattr(args, "given", None) or [])
    sections = bench.collect_sections(args.job_files, given, run.sections)
    jobs, more = build_jobs(sections, readonly=readonly)
    return jobs, [*notes, *more]


def job_of(*words: str) -> Job:
    (job,), _ = jobs_of("--filename=/x:/y", *words)
    return job


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_every_option_of_fio_is_used_noted_or_refused_for_a_reason() -> None:
    # Goal: no option of a job file can be silently dropped. Method: fio's own list of options.
    text = subprocess.run(["fio", "--cmdhelp=all"], capture_output=True, text=True, check=True)
    names = [line.split(":")[0].strip() for line in text.stdout.splitlines() if ":" in line[:26]]
    names = [name for name in names if name and " " not in name]
    assert len(names) > 150
    unknown = []
    for name in names:
        try:
            options.classify(options.canonical(name))
        except UsageError as error:
            if "unknown option" in str(error):
                unknown.append(name)
    assert unknown == []


def test_no_option_has_two_fates() -> None:
    assert not set(options.OPTIONS) & set(NOTED)
    assert not set(options.OPTIONS) & set(REFUSED)
    assert not set(NOTED) & set(REFUSED)
    assert all("-" not in name for table in (NOTED, REFUSED) for name in table)


def test_the_reference_has_every_option() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for option in options.OPTIONS.values():
        assert f"| `{options.spelling(option.name)[2:]}`" in text, option.name
        assert all(f"`{alias}`" in text for alias in option.aliases), option.name
    for name in (*NOTED, *REFUSED):
        assert f"`{name}`" in text, name


def test_flags_need_no_value_and_do_not_eat_the_next_word() -> None:
    words = bench.normalize(["--time_based", "job.fio", "--direct=0", "--stripe_unit", "64k"])
    assert words == ["--time_based=1", "job.fio", "--direct=0", "--stripe-unit=64k"]


def test_both_spellings_of_own_options() -> None:
    assert job_of("--stripe-unit=64k").stripe_unit == 65536
    assert job_of("--stripe_unit=64k").stripe_unit == 65536
    assert job_of("--page-size=2m").read_bs == 2 << 20


def test_aliases() -> None:
    job = job_of("--readwrite=randwrite", "--blocksize=8k", "--timeout=3", "--io_limit=1m")
    assert (job.rw, job.write_bs, job.runtime_s, job.io_size) == (
        "randwrite", 8192, 3.0, ("bytes", 1 << 20),
    )  # fmt: skip


def test_defaults_are_those_of_fio() -> None:
    job = job_of()
    assert (job.rw, job.read_bs, job.iodepth, job.numjobs) == ("read", 4096, 1, 1)
    assert (job.thread, job.fixedbufs, job.loops, job.rwmixread) == (False, False, 1, 50)
    # fio's direct=0 would measure memory: here it is taken where it can be had.
    assert job.direct == "prefer"


def test_each_name_starts_a_job_and_what_stands_before_is_shared() -> None:
    jobs, _ = jobs_of("--filename=/x", "--bs=64k", "--name=a", "--rw=read", "--name=b", "--bs=8k")
    assert [(job.name, job.read_bs, job.rw) for job in jobs] == [
        ("a", 65536, "read"),
        ("b", 8192, "read"),
    ]
    assert jobs[0].settings == (("name", "a"), ("rw", "read"))
    assert jobs[0].global_settings == (("filename", "/x"), ("bs", "64k"))


def test_command_line_overrides_a_job_file(tmp_path: object) -> None:
    path = tmp_path / "j.fio"  # type: ignore[operator]
    path.write_text("[a]\nfilename=/x\nruntime=60\nbs=4k\n[b]\nfilename=/x\n")
    jobs, _ = jobs_of(str(path), "--runtime=1")
    assert [(job.name, job.runtime_s, job.read_bs) for job in jobs] == [
        ("a", 1.0, 4096),
        ("b", 1.0, 4096),
    ]
    only, _ = jobs_of(str(path), "--section=b")
    assert [job.name for job in only] == ["b"]
    with pytest.raises(UsageError, match="no section c"):
        jobs_of(str(path), "--section=c")
    with pytest.raises(UsageError, match="cannot be used with job files"):
        jobs_of(str(path), "--name=z")


def test_an_option_of_the_command_is_refused_in_a_job_file(tmp_path: object) -> None:
    path = tmp_path / "j.fio"  # type: ignore[operator]
    path.write_text("[a]\nfilename=/x\nallow_destroy=1\n")
    with pytest.raises(UsageError, match=r"j.fio:3: .*command line"):
        jobs_of(str(path))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--runtme=3", "unknown option --runtme; did you mean runtime"),
        ("--thinktime=5", "option --thinktime is not supported: use rate"),
        ("--bssplit=4k/50:8k/50", "is not supported"),
        ("--zonemode=zbd", "zoned devices are not supported"),
        ("--rw=trim", "rw=trim is not one of"),
        ("--rw=randread:8", "is not one of"),
        ("--bs=4x", "no size suffix"),
        ("--bs=0", "bs must be greater than 0"),
        ("--iodepth=0", "iodepth must be greater than 0"),
        ("--iodepth=5000", "more than the engine's 4096"),
        ("--iodepth=x", "not a whole number"),
        ("--numjobs=0", "numjobs must be greater"),
        ("--direct=2", "neither 0 nor 1"),
        ("--ioengine=rbd", "ioengine=rbd is not supported"),
        ("--engine=aio", "engine=aio is not one of"),
        ("--stripe-unit=100k", "not a power of two"),
        ("--rwmixread=101", "rwmixread=101"),
        ("--time_based", "time_based needs a runtime"),
        ("--runtime=soon", "is not a time"),
        ("--size=110%", "not between 0% and 100%"),
        ("--verify=crc33", "verify=crc33 is not one of"),
        ("--verify=pattern", "needs verify_pattern"),
        ("--verify_only", "verify_only needs verify"),
        ("--random_distribution=zipf", "needs a number"),
        ("--random_distribution=zoned:50/10:40/90", "add up to 100"),
        ("--hugepages=yes", "hugepages=yes is not one of"),
        ("--percentile_list=0:50", "not a list of 1 to 20 percentiles"),
        ("--cpus_allowed=9999", "CPU 9999 is not available"),
        ("--kb_base=1001", "neither 1000 nor 1024"),
        ("--continue_on_error=maybe", "continue_on_error=maybe"),
        ("--deadline=0", "deadline must be greater than 0"),
        ("--workers=0", "workers must be greater than 0"),
        ("--filename=/x:/x", "names a member twice"),
        ("--output-format=terse", "is not one of normal, json"),
        ("--pairs=0", "pairs must be"),
    ],
)
def test_mistakes_are_named(word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        jobs_of("--filename=/x", word)


def test_options_without_meaning_are_noted_once() -> None:
    jobs, notes = jobs_of(
        "--filename=/x", "--gtod_reduce", "--invalidate=1", "--name=a", "--name=b"
    )
    assert len(jobs) == 2
    assert any(note.startswith("gtod_reduce has no effect") for note in notes)
    assert any(note.startswith("invalidate has no effect") for note in notes)


def test_fio_engines_are_mapped() -> None:
    assert job_of("--ioengine=io_uring").engine == "io_uring"
    jobs, notes = jobs_of("--filename=/x", "--ioengine=libaio", "--iodepth=8")
    assert (jobs[0].engine, jobs[0].iodepth) == ("io_uring", 8)
    assert any("libaio" in note for note in notes)
    jobs, notes = jobs_of("--filename=/x", "--ioengine=psync", "--iodepth=8")
    assert (jobs[0].engine, jobs[0].iodepth) == ("threads", 1)  # as in fio
    assert any("one I/O in flight" in note for note in notes)
    assert job_of("--ioengine=psync", "--engine=threads", "--iodepth=8").iodepth == 8


def test_direct_and_buffered() -> None:
    assert job_of("--direct=1").direct is True
    assert job_of("--direct=0").direct is False
    assert job_of("--buffered=1").direct is False


def test_batches() -> None:
    assert job_of("--iodepth=128", "--iodepth_batch=32").submit_batch == 32
    assert job_of("--iodepth=128", "--iodepth_batch_complete=16").submit_batch == 16
    assert job_of("--iodepth=8", "--iodepth_batch=0").submit_batch == 8
    assert job_of("--iodepth=8").submit_batch is None


def test_directions_and_rates() -> None:
    job = job_of("--rw=randrw", "--bs=4k,64k", "--rate=1m,", "--rate_iops=,500")
    assert (job.read_bs, job.write_bs) == (4096, 65536)
    assert (job.rate, job.rate_iops) == ((1 << 20, 0), (0, 500))


def test_kb_base_counts_from_where_it_stands() -> None:
    assert job_of("--kb_base=1000", "--bs=4k").read_bs == 4000
    assert job_of("--bs=4k", "--kb_base=1000").read_bs == 4096


def test_page_size_and_bs_may_not_differ() -> None:
    assert job_of("--page-size=64k", "--bs=64k").read_bs == 65536
    with pytest.raises(UsageError, match="differ"):
        job_of("--page-size=64k", "--bs=4k")


def test_readonly_refuses_jobs_that_write() -> None:
    with pytest.raises(UsageError, match="--readonly forbids"):
        jobs_of("--filename=/x", "--rw=randrw", readonly=True)
    jobs, _ = jobs_of("--filename=/x", "--rw=write", "--verify=md5", "--verify_only", readonly=True)
    assert not jobs[0].changes_members


def test_made_up_names_have_one_set_for_each_copy() -> None:
    jobs, _ = jobs_of("--name=j", "--directory=/d", "--nrfiles=2", "--numjobs=2", "--size=1m")
    assert [copy.members for copy in jobs[0].copies()] == [
        ("/d/j.0.0", "/d/j.0.1"),
        ("/d/j.1.0", "/d/j.1.1"),
    ]
    assert len({copy.seed for copy in jobs[0].copies()}) == 2


def test_seeds_repeat_unless_told_otherwise() -> None:
    assert job_of().seed == job_of().seed
    assert job_of("--randseed=7").seed == 7
    assert job_of("--randrepeat=0").seed != job_of("--randrepeat=0").seed


def test_random_percentiles_are_sorted() -> None:
    assert job_of("--percentile_list=99.9:50").percentiles == (50.0, 99.9)
