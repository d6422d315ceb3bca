"""What a bench may write to: its own files and what is empty, nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvio.cli import guard
from kvio.cli.common import BenchError, UsageError
from kvio.cli.jobfile import Section, Setting
from kvio.cli.jobs import Job
from kvio.cli.jobspec import build_jobs
from kvio.testing import LoopDevices


def make_job(*settings: str) -> Job:
    pairs = [Setting(*text.split("=", 1), "") for text in settings]
    return build_jobs([Section("j", pairs)])[0][0]


def prepare(*jobs: Job, allow_destroy: bool = False, readonly: bool = False) -> list[str]:
    said: list[str] = []
    guard.prepare_members(
        list(jobs), allow_destroy=allow_destroy, readonly=readonly, say=said.append
    )
    return said


def keeps_marks(folder: Path) -> bool:
    try:
        os.setxattr(folder, guard.MARK, b"1")
        os.removexattr(folder, guard.MARK)
    except OSError:
        return False
    return True


def test_missing_members_are_made_with_their_share_of_the_size(tmp_path: Path) -> None:
    names = ":".join(str(tmp_path / name) for name in "abc")
    said = prepare(make_job(f"filename={names}", "rw=read", "size=10m", "bs=64k"))
    assert [os.stat(tmp_path / name).st_size for name in "abc"] == [4 << 20] * 3
    assert "made 3 member(s) of 4 MiB" in said[0]


def test_made_members_count_offset_and_copies(tmp_path: Path) -> None:
    prepare(make_job(f"filename={tmp_path}/a", "size=1m", "offset=2m", "offset_increment=1m",
                     "numjobs=3"))  # fmt: skip
    assert os.stat(tmp_path / "a").st_size == 5 << 20


def test_filesize_decides_when_given(tmp_path: Path) -> None:
    prepare(make_job(f"filename={tmp_path}/a", "filesize=10000", "bs=4k"))
    assert os.stat(tmp_path / "a").st_size == 12288  # whole blocks


def test_nothing_is_made_without_a_size(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"size .* is needed"):
        prepare(make_job(f"filename={tmp_path}/a", "rw=read"))
    assert not (tmp_path / "a").exists()


def test_nothing_is_made_when_it_is_forbidden(tmp_path: Path) -> None:
    job = make_job(f"filename={tmp_path}/a", "rw=read", "size=1m")
    with pytest.raises(BenchError, match="--readonly forbids"):
        prepare(job, readonly=True)
    with pytest.raises(BenchError, match="allow_file_create=0 forbids"):
        prepare(make_job(f"filename={tmp_path}/a", "size=1m", "allow_file_create=0"))
    with pytest.raises(BenchError, match="no such device"):
        prepare(make_job("filename=/dev/kvio-nope", "size=1m"))
    with pytest.raises(BenchError, match="cannot make"):
        prepare(make_job(f"filename={tmp_path}/no/such/a", "size=1m"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_data_is_refused_and_left_alone(tmp_path: Path) -> None:
    # The data starts late: a check of the head alone would overwrite it.
    path = tmp_path / "precious"
    contents = bytes(3 << 20) + b"x" + bytes(1000)
    path.write_bytes(contents)
    job = make_job(f"filename={path}", "rw=write")
    with pytest.raises(
        BenchError, match=r"refusing to write .*byte 3145728 is 0x78.*--allow-destroy"
    ):
        prepare(job)
    assert path.read_bytes() == contents
    assert "overwriting" in prepare(job, allow_destroy=True)[0]
    assert prepare(make_job(f"filename={path}", "rw=read")) == []
    assert prepare(make_job(f"filename={path}", "rw=write", "verify=md5", "verify_only=1")) == []


def test_zeros_and_holes_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(2 << 20))
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 30)
    for name in ("zeros", "hole"):
        assert prepare(make_job(f"filename={tmp_path}/{name}", "rw=write")) == []


def test_own_files_may_be_written_again(tmp_path: Path) -> None:
    if not keeps_marks(tmp_path):
        pytest.skip("this file system keeps no user attributes")
    path = tmp_path / "a"
    prepare(make_job(f"filename={path}", "size=1m"))
    path_fd = os.open(path, os.O_WRONLY)
    os.pwrite(path_fd, b"data of an earlier bench", 0)
    os.close(path_fd)
    assert prepare(make_job(f"filename={path}", "rw=write")) == []
    # The mark goes with the file, not with its name.
    path.unlink()
    path.write_bytes(b"somebody else's" * 1000)
    with pytest.raises(BenchError, match="refusing"):
        prepare(make_job(f"filename={path}", "rw=write"))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    job = make_job(f"filename={path}", "rw=write")
    prepare(job)  # not a file: kvio.Volume.open refuses it with its own words
    link = tmp_path / "dangling"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match="is needed to make"):
        prepare(make_job(f"filename={link}", "rw=write"))


@pytest.mark.skipif(os.geteuid() != 0, reason="loop devices need root")
def test_block_devices_with_data_are_refused() -> None:
    with LoopDevices(1, 64 << 20) as loops:
        (path,) = loops.paths
        assert stat.S_ISBLK(os.stat(path).st_mode)
        job = make_job(f"filename={path}", "rw=randwrite")
        assert prepare(job) == []
        # In the middle, where no signature is looked for.
        fd = os.open(loops.backing[0], os.O_WRONLY)
        os.pwrite(fd, b"\x01" * (1 << 20), 32 << 20)
        os.close(fd)
        with pytest.raises(BenchError, match="refusing to write"):
            prepare(job)
        assert prepare(job, allow_destroy=True) != []
        assert prepare(make_job(f"filename={path}", "rw=randread")) == []


def test_only_made_members_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    guard.unlink_members([str(tmp_path / "a")])
    assert not (tmp_path / "a").exists()
    with pytest.raises(BenchError, match="cannot remove"):
        guard.unlink_members([str(tmp_path / "a")])
