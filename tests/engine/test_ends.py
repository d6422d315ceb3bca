"""Where members end: short reads at the end of a file, files cut short under an open volume, full
file systems, holes. A short transfer is never taken for a whole one.

Method: real files, tmpfs and FUSE; the operating system's own pread is the oracle.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Content, aligned, same
from tests.support import images
from tests.support.faultdev import FaultDevice

ODD = 10_000


@pytest.fixture
def odd_file(tmp_path: Path, rng: np.random.Generator) -> Path:
    """A file whose length is no multiple of anything."""
    path = tmp_path / "odd"
    path.write_bytes(rng.bytes(ODD))
    return path


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("direct", ["prefer", False], ids=["direct", "cached"])
def test_reads_at_the_end_of_an_odd_file(
    direct: bool | str, engine: str, odd_file: Path, opened: Opener
) -> None:
    vol = opened([odd_file], direct=direct, engine=engine)
    whole = odd_file.read_bytes()
    assert vol.size == ODD
    places = [0, 4096, 8192, 8193, 9999, ODD, ODD + 1, 12288, 16384, 2**40]
    lengths = [16384, 8192, 8192, 4096, 1, 1, 1, 4096, 4096, 4096]
    expected = [min(n, max(ODD - at, 0)) for at, n in zip(places, lengths, strict=True)]
    into = [aligned(n) for n in lengths]
    for part in into:
        part[:] = 0xEE
    assert vol.read_batch(places, into).tolist() == expected
    for at, n, part in zip(places, expected, into, strict=True):
        same(part[:n], whole[at : at + n], f"read at {at}")
        # Like preadv's, a direct read may zero the rest of the last block, and nothing after it.
        block_end = -(-n // 4096) * 4096
        assert (part[block_end:] == 0xEE).all(), f"read at {at}: bytes beyond the end were touched"
    for at, n, part in zip(places, expected, into, strict=True):
        assert vol.pread(part, at) == n
        assert vol.submit_read([at], [part]).wait(20).tolist() == [n]


def test_aligned_read_across_the_end_is_short_also_where_unaligned_is_refused(
    odd_file: Path, opened: Opener
) -> None:
    """What preadv with O_DIRECT gives for the same aligned request: 1808 bytes, no EINVAL."""
    vol = opened([odd_file], unaligned="refuse")
    into = aligned(8192)
    assert vol.pread(into, 8192) == ODD - 8192
    same(into[: ODD - 8192], odd_file.read_bytes()[8192:], "the tail")


def test_scattered_read_across_the_end_fills_the_pieces_in_order(
    odd_file: Path, opened: Opener
) -> None:
    vol = opened([odd_file])
    parts = [aligned(4096) for _ in range(4)]
    assert vol.read_batch([0], [parts]).tolist() == [ODD]
    same(np.concatenate(parts)[:ODD], odd_file.read_bytes(), "the file")
    skewed = [aligned(n, skew=1) for n in (1, 5000, 3, 6000)]
    assert vol.read_batch([1], [skewed]).tolist() == [ODD - 1]
    same(np.concatenate(skewed)[: ODD - 1], odd_file.read_bytes()[1:], "the file from byte 1")


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_file_cut_short_under_an_open_volume(
    engine: str, make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    """Goal: what is gone is reported as short, and never filled up from a later member."""
    paths = make_files(2, MIB)
    vol = opened(paths, engine=engine, stripe_unit=64 * KIB)
    content = Content(vol, rng)
    os.truncate(paths[1], 96 * KIB)  # member 1 loses half of its second unit and all later ones
    into = aligned(vol.size)
    into[:] = 0xEE
    # whole: units 0 to 2; member 1's second unit is unit 3 of the volume
    assert vol.pread(into, 0) == 3 * 64 * KIB + 32 * KIB
    same(into[: 224 * KIB], content.image[: 224 * KIB], "what is left")
    units = np.arange(vol.size // (64 * KIB))
    got = vol.read_batch(units * 64 * KIB, into)
    expected = [64 * KIB if unit % 2 == 0 or unit == 1 else 0 for unit in units]
    expected[3] = 32 * KIB
    assert got.tolist() == expected
    for unit, n in zip(units, expected, strict=True):
        at = int(unit) * 64 * KIB
        same(into[at : at + n], content.image[at : at + n], f"unit {unit}")
    assert vol.stats().short_reads > 0
    os.truncate(paths[1], 0)
    assert vol.pread(into, 0) == 64 * KIB


def test_truncated_to_an_unaligned_length(
    make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(1, MIB))
    content = Content(vol, rng)
    os.truncate(vol.members[0].path, 100_001)
    into = aligned(256 * KIB)
    assert vol.pread(into, 0) == 100_001
    same(into[:100_001], content.image[:100_001], "what is left")
    assert vol.pread(into, 98_304) == 100_001 - 98_304
    assert vol.pread(into[:4096], 102_400) == 0


@pytest.mark.root
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("keep", [1, 512, 1000, 4096, 5000, 130_000])
def test_reads_that_a_file_system_cuts_short_are_continued(
    keep: int, engine: str, require_root: None, rng: np.random.Generator
) -> None:
    """Goal: each short read is continued where it ended. Method: a FUSE file that moves at most
    ``keep`` bytes at the first requests; also less than a block. (Writes cannot be shown this way:
    the kernel itself makes EIO of a short direct write to a FUSE file.)"""
    with FaultDevice(4 * MIB, loop=False) as disk:
        with kvio.Volume.open([disk.path], mode="rw", direct=True, engine=engine) as vol:
            content = Content(vol, rng)
            part = 256 * KIB
            into = [aligned(part) for _ in range(4)]
            # less than a block twice running is how the end of a file looks: once, for these
            often = 3 if keep >= 512 else 1
            disk.short("read", keep, times=often)
            assert vol.read_batch(np.arange(4) * part, into).tolist() == [part] * 4
            same(np.concatenate(into), content.image[: 4 * part], "the batch")
            # FUSE makes two requests of such a read: both may have been among the short ones
            assert vol.stats().short_reads >= (often + 1) // 2
            disk.short("read", keep, times=1)
            assert vol.pread(into[0], MIB) == part
            same(into[0], content.image[MIB : MIB + part], "one read")
            disk.short("read", keep, times=often)
            pieces = [aligned(n * 4096) for n in (1, 60, 2, 1)]
            assert vol.read_batch([2 * MIB], [pieces]).tolist() == [part]
            same(np.concatenate(pieces), content.image[2 * MIB : 2 * MIB + part], "pieces")


@pytest.mark.root
@pytest.mark.parametrize("keep", [4096, 100, 0])
def test_file_system_that_never_moves_more_gives_a_short_result(
    keep: int, require_root: None, rng: np.random.Generator
) -> None:
    with FaultDevice(MIB, loop=False) as disk:
        with kvio.Volume.open([disk.path], mode="rw", direct=True) as vol:
            content = Content(vol, rng)
            disk.short("read", keep)
            into = aligned(16 * KIB)
            got = vol.pread(into, 0)
            assert got == (16 * KIB if keep == 4096 else keep)
            same(into[:got], content.image[:got], "what came")
            disk.clear()
            disk.short("write", 0)
            with pytest.raises(kvio.KvioError) as caught:
                vol.pwrite(into, 0)
            assert caught.value.errno == errno.EIO


@pytest.mark.root
def test_full_tmpfs_fails_the_write_with_enospc(require_root: None) -> None:
    """Goal: ENOSPC is a failure of that operation, and what was there stays. Method: members with
    holes on a tmpfs without room (direct=False: it is about space, not about O_DIRECT)."""
    with images.mounted("tmpfs", size_bytes=8 * MIB) as folder:
        paths = [folder / "a", folder / "b"]
        for path in paths:
            path.write_bytes(b"\1" * MIB)
            os.truncate(path, 16 * MIB)
        with kvio.Volume.open(paths, mode="rw", direct=False, stripe_unit=MIB) as vol:
            assert all(member.sparse for member in vol.members)
            before = aligned(2 * MIB)
            assert vol.pread(before, 0) == 2 * MIB
            with images.full(folder):
                failed: list[kvio.KvioError] = []
                data = [aligned(MIB) for _ in range(8)]
                got = vol.write_batch(np.arange(2, 10) * MIB, data, errors=failed)
                assert (got == -errno.ENOSPC).all()
                assert len(failed) == 8
                for error in failed:
                    assert (error.error_class, error.op, error.length) == ("space", "write", MIB)
                    assert error.filename == str(paths[error.member])
                same(before, b"\1" * 2 * MIB, "before")
                again = aligned(2 * MIB)
                assert vol.pread(again, 0) == 2 * MIB
                same(again, before, "what was there")
                assert vol.pwrite(data[0], 0) == MIB, "room that is taken already can be written"
                # a hole reads as zeros, full or not
                assert vol.pread(again, 20 * MIB) == 2 * MIB
                assert not again.any()
            assert (vol.write_batch(np.arange(2, 6) * MIB, data[:4]) == MIB).all()
            vol.flush()


@pytest.mark.root
def test_room_that_ends_in_the_middle_of_a_write(require_root: None) -> None:
    """A write that found room for its first part only is a failure or a short result."""
    with images.mounted("tmpfs", size_bytes=4 * MIB) as folder:
        path = folder / "member"
        path.touch()
        os.truncate(path, 16 * MIB)
        with kvio.Volume.open([path], mode="rw", direct=False) as vol:
            failed: list[kvio.KvioError] = []
            data = aligned(8 * MIB)
            data[:] = 3
            got = vol.write_batch([0], [data], errors=failed)[0]
            assert got < 8 * MIB
            if got < 0:
                assert got == -errno.ENOSPC
                assert [error.error_class for error in failed] == ["space"]


def test_sparse_file_is_told_and_reads_as_zeros(tmp_path: Path, opened: Opener) -> None:
    path = tmp_path / "hole"
    path.touch()
    os.truncate(path, 8 * MIB)
    vol = opened([path])
    assert vol.members[0].sparse
    into = aligned(MIB)
    into[:] = 1
    assert vol.pread(into, 3 * MIB) == MIB
    assert not into.any()
    into[:] = 9
    assert vol.pwrite(into, 3 * MIB) == MIB
    again = aligned(3 * MIB)
    assert vol.pread(again, 2 * MIB) == 3 * MIB
    assert np.unique(again[:MIB]).tolist() == [0]
    assert np.unique(again[MIB : 2 * MIB]).tolist() == [9]


def test_write_beyond_the_end_does_not_grow_the_file(odd_file: Path, opened: Opener) -> None:
    vol = opened([odd_file])
    for at in (8192, 12288, 2**40):
        with pytest.raises(kvio.KvioError) as caught:
            vol.pwrite(aligned(4096), at)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.offset == at
    assert odd_file.stat().st_size == ODD
