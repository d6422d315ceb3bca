"""fio job files: sections, globals, includes, variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvio.cli.common import UsageError
from kvio.cli.jobfile import parse_job_file


def write(folder: Path, text: str, name: str = "job.fio") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def as_pairs(section: object) -> list[tuple[str, str]]:
    return [(s.name, s.value) for s in section.settings]  # type: ignore[attr-defined]


def test_globals_come_first_and_apply_to_later_sections_only(tmp_path: Path) -> None:
    text = """
        ; comment
        [global]
        bs = 4k      # trailing comment
        direct=1
        [a]
        rw=read
        time_based
        [global]
        iodepth=8
        [b]
        bs=8k
    """
    first, second = parse_job_file(write(tmp_path, text))
    assert first.name == "a"
    assert as_pairs(first) == [("bs", "4k"), ("direct", "1"), ("rw", "read"), ("time_based", "1")]
    assert first.global_count == 2
    assert as_pairs(second) == [("bs", "4k"), ("direct", "1"), ("iodepth", "8"), ("bs", "8k")]


def test_variables_are_expanded(tmp_path: Path) -> None:
    text = "[a]\nfilename=${DEV}:x\nnumjobs=$ncpus\nbs=$pagesize\n"
    (section,) = parse_job_file(write(tmp_path, text), environ={"DEV": "/dev/nvme9n1"})
    values = dict(as_pairs(section))
    assert values["filename"] == "/dev/nvme9n1:x"
    assert int(values["numjobs"]) >= 1
    assert int(values["bs"]) >= 4096


def test_an_unset_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"job.fio:2: environment variable NOPE is not set"):
        parse_job_file(write(tmp_path, "[a]\nfilename=${NOPE}\n"), environ={})


def test_include_is_relative_to_the_file_and_may_open_globals(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub", "[global]\nbs=64k\ninclude deeper.fio\n", "common.fio")
    write(tmp_path / "sub", "iodepth=4\n", "deeper.fio")
    path = write(tmp_path, "[global]\ninclude sub/common.fio\n[a]\nrw=read\n")
    (section,) = parse_job_file(path)
    assert as_pairs(section) == [("bs", "64k"), ("iodepth", "4"), ("rw", "read")]


def test_a_circle_of_includes_ends(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="levels deep"):
        parse_job_file(write(tmp_path, "[a]\ninclude job.fio\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rw=read\n", "before any"),
        ("[a\nrw=read\n", "is not a section"),
        ("[]\n", "is not a section"),
        ("; nothing\n", "no job section"),
        ("[global]\nbs=4k\n", "no job section"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_job_file(write(tmp_path, text))


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read job file"):
        parse_job_file(tmp_path / "nope.fio")
    binary = tmp_path / "binary.fio"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text file"):
        parse_job_file(binary)
