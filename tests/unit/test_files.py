"""Volume.create: files that are there are replaced when all new ones are whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvio


def test_a_create_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    old = [tmp_path / "p", tmp_path / "q"]
    for path in old:
        path.write_text(f"precious {path.name}")
    with pytest.raises(kvio.KvioError, match="nothing was changed"):
        kvio.Volume.create([*old, tmp_path / "missing" / "x"], size_bytes=4096, overwrite=True)
    assert [path.read_text() for path in old] == ["precious p", "precious q"]
    assert sorted(os.listdir(tmp_path)) == ["p", "q"]


def test_overwrite_replaces_all(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("old")
    names = kvio.Volume.create([tmp_path / "p", tmp_path / "q"], size_bytes=8192, overwrite=True)
    assert [os.path.getsize(name) for name in names] == [8192, 8192]
    assert sorted(os.listdir(tmp_path)) == ["p", "q"]


def test_without_overwrite_nothing_is_touched(tmp_path: Path) -> None:
    (tmp_path / "q").write_text("old")
    with pytest.raises(kvio.KvioError, match="overwrite=True"):
        kvio.Volume.create([tmp_path / "p", tmp_path / "q"], size_bytes=4096)
    assert os.listdir(tmp_path) == ["q"]


def test_a_leftover_of_another_process_with_this_pid_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / f"p.creating-{os.getpid()}").write_text("left over")
    kvio.Volume.create([tmp_path / "p"], size_bytes=4096)
    assert (tmp_path / "p").stat().st_size == 4096


@pytest.mark.parametrize("size", [0, -4096, 4095, 1 << 63, 1 << 70])
def test_sizes_that_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match="size_bytes"):
        kvio.Volume.create([tmp_path / "p"], size_bytes=size)
    assert os.listdir(tmp_path) == []


def test_an_empty_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        kvio.Volume.create([tmp_path / "p", ""], size_bytes=4096)
    assert os.listdir(tmp_path) == []
