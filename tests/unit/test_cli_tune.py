"""kvio tune: which files it takes, and a command line that can be pasted."""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path

import pytest

from kvio.cli import units
from kvio.cli.main import main

QUICK = ["--bs=64k", "--iodepth=1", "--runtime=20ms", "--json"]


def member(folder: Path, name: str) -> str:
    path = folder / name
    path.write_bytes(bytes(1 << 20))
    return str(path)


@pytest.mark.parametrize("name", ["col:on", "two words", "$(x)'\"", "pci-0000:01:00.0-nvme-1"])
def test_a_name_is_taken_as_it_is(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for decoy in ("col", "on"):
        (tmp_path / decoy).write_bytes(bytes(1 << 20))
    member(tmp_path, name)
    with contextlib.chdir(tmp_path):
        assert main(["tune", name, "--rw=write", *QUICK]) == 0
    assert any((tmp_path / name).read_bytes())
    assert not any((tmp_path / "col").read_bytes() + (tmp_path / "on").read_bytes())
    found = json.loads(capsys.readouterr().out)
    words = shlex.split(found["recommendation"]["command"])
    option = next(word for word in words if word.startswith("--filename="))
    assert units.split_escaped(option.removeprefix("--filename="), ":") == [name]
    assert found["members"] == [name]


@pytest.mark.parametrize("words", [["a:b"], ["a", "b"]])
def test_lists_of_members(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        member(tmp_path, name)
    with contextlib.chdir(tmp_path):
        assert main(["tune", *words, *QUICK]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"] == ["a", "b"]
    assert "--filename=a:b " in found["recommendation"]["command"]


def test_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(tmp_path):
        assert main(["tune", "typo", "--rw=write", "--size=1m", *QUICK]) == 1
        assert capsys.readouterr().err == "kvio: typo: no such file or device\n"
        Path("full").write_bytes(b"x" * (1 << 20))
        assert main(["tune", "full", "--rw=write", *QUICK]) == 1
        assert capsys.readouterr().err.startswith("kvio: refusing to write to full")
        assert main(["tune", "full", "--size=1t", *QUICK]) == 2
        assert capsys.readouterr().err.startswith("kvio: offset 0 B + size 1 TiB")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
