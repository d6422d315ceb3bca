"""Sizes and times: fio itself is the oracle where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio.cli import common, units
from kvio.cli.common import UsageError

needs_fio = pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")


def fio_reads_size(text: str, kb_base: int) -> int:
    """What fio takes for bs=text: one I/O of its null engine has that many bytes."""
    command = ["fio", "--name=x", "--ioengine=null", "--size=8g", f"--kb_base={kb_base}",
               f"--bs={text}", "--number_ios=1", "--output-format=json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["jobs"][0]["read"]["io_bytes"])


@needs_fio
@pytest.mark.parametrize("kb_base", [1024, 1000])
@pytest.mark.parametrize("text", ["4096", "4k", "4K", "4kb", "4KB", "4ki", "4kib", "4KiB", "1m",
                                  "1mb", "1mi", "1mib", "0x1000", "512b", "1g"])  # fmt: skip
def test_sizes_are_what_fio_reads(text: str, kb_base: int) -> None:
    # Goal: the same job moves the same bytes. Method: ask the real fio.
    assert units.parse_size(text, kb_base=kb_base) == fio_reads_size(text, kb_base)


@pytest.mark.parametrize("text", ["", "k", "4x", "4kk", "-4k", "4.5k", "4 k", "0x", "kib"])
def test_sizes_that_fio_would_misread_are_refused(text: str) -> None:
    # fio takes "4x" for 4 bytes; a mistyped size must not run.
    with pytest.raises(UsageError):
        units.parse_size(text)


@given(st.integers(min_value=1, max_value=2**60))
def test_spell_size_is_read_back(count: int) -> None:
    assert units.parse_size(units.spell_size(count)) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 2), ("2s", 2), ("500ms", 0.5), ("1500msec", 1.5), ("20us", 20e-6), ("2m", 120),
     ("1h", 3600), ("1d", 86400)],
)  # fmt: skip
def test_times(text: str, seconds: float) -> None:
    assert units.parse_time_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "2x", "-1", "1.5", "2 s"])
def test_bad_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        units.parse_time_s(text)


def test_extents() -> None:
    assert units.parse_extent("25%") == ("percent", 25)
    assert units.parse_extent("1g") == ("bytes", 1 << 30)
    with pytest.raises(UsageError):
        units.parse_extent("101%")


def test_colon_lists_keep_escaped_colons() -> None:
    assert units.split_escaped(r"/dev/a:/dev/b\:c::d\e", ":") == ["/dev/a", "/dev/b:c", r"d\e"]


def test_per_direction() -> None:
    assert units.per_direction("4k", "bs") == ("4k", "4k")
    assert units.per_direction("4k,8k", "bs") == ("4k", "8k")
    assert units.per_direction(",8k", "rate") == ("", "8k")
    assert units.per_direction("8k,", "rate") == ("8k", "")
    with pytest.raises(UsageError):
        units.per_direction("1,2,3,4", "bs")


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0 B/s"), (999, "1.0 kB/s"), (52.4e6, "52.4 MB/s"), (812e6, "812 MB/s"),
     (999.6e6, "1.00 GB/s"), (4.214e9, "4.21 GB/s")],
)  # fmt: skip
def test_rates(rate: float, text: str) -> None:
    assert common.format_rate(rate) == text


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0 ns"), (950, "950 ns"), (1500, "1.5 us"), (7.12e6, "7.12 ms"), (3e9, "3 s")],
)
def test_latencies(ns: float, text: str) -> None:
    assert common.format_ns(ns) == text


def test_other_formats() -> None:
    assert common.format_size(4096) == "4 KiB"
    assert common.format_size(1536) == "1.5 KiB"
    assert common.format_size(5) == "5 B"
    assert common.format_bytes(268_435_456) == "268 MB"
    assert common.format_bytes(1_000_000_000) == "1 GB"
    assert common.format_count(4015) == "4015"
    assert common.format_count(43_210) == "43.2k"
    assert common.format_seconds(0.52) == "0.52 s"
    assert common.format_seconds(125) == "2:05"
    assert common.format_seconds(3725) == "1:02:05"
    assert common.table([("a", "1"), ("bb", "22")], header=("x", "n"), right="lr") == (
        "x    n\na    1\nbb  22"
    )
