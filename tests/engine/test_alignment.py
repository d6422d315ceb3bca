"""Alignment and place: every byte lies where the layout says, whatever the members' sectors and
sizes; what is not aligned is copied or refused, and nothing beside what was asked for is touched.

Method: the members read back behind the volume's back, against a model of the layout that shares no
code with the engine; canaries around the buffers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, Bytes, Content, aligned, in_thread, same
from tests.support.faultdev import FaultDevice

UNIT = 64 * KIB
CANARY = 0xA5
ENGINES = pytest.mark.parametrize("engine", ["io_uring", "threads"])


def striped(image: Bytes, sizes: Sequence[int], unit: int) -> list[Bytes]:
    """What each member must hold of a volume: row after row, those that are long enough."""
    if len(sizes) == 1:
        return [image]
    parts: list[list[Bytes]] = [[] for _ in sizes]
    at = 0
    for row in range(max(sizes) // unit):
        for member, size in enumerate(sizes):
            if size // unit > row:
                parts[member].append(image[at : at + unit])
                at += unit
    assert at == image.size, "the model and the volume differ in size"
    return [np.concatenate(part) if part else np.zeros(0, np.uint8) for part in parts]


def check_members(paths: Sequence[str], content: Content, unit: int, rest: int = CANARY) -> None:
    """The members' bytes against the model; what the volume does not use is as it was."""
    sizes = [member.size_bytes for member in content.vol.members]
    for path, size, expected in zip(paths, sizes, striped(content.image, sizes, unit), strict=True):
        fd = os.open(path, os.O_RDONLY)
        try:
            data = np.frombuffer(os.pread(fd, size, 0), np.uint8)
        finally:
            os.close(fd)
        same(data[: expected.size], expected, path)
        assert (data[expected.size :] == rest).all(), f"{path}: written beyond its last stripe unit"


def fill(paths: Sequence[str], byte: int = CANARY) -> None:
    for path in paths:
        with open(path, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            assert file.write(bytes([byte]) * size) == size
            os.fsync(file.fileno())


def random_traffic(vol: kvio.Volume, rng: np.random.Generator, turns: int = 25) -> Content:
    """Writes the whole volume, then pieces of all sizes; reads each of them back."""
    content = Content(vol, rng)
    grain = vol.alignment
    for _ in range(turns):
        length = int(rng.integers(1, vol.size // 3 // grain)) * grain
        start = int(rng.integers(0, (vol.size - length) // grain + 1)) * grain
        data = aligned(length)
        data[:] = np.frombuffer(rng.bytes(length), np.uint8)
        content.write(start, data)
        content.check(
            max(0, start - grain), min(length + 2 * grain, vol.size - max(0, start - grain))
        )
    content.check(0, vol.size)
    return content


@pytest.mark.parametrize(
    "sizes",
    [
        (4 * MIB, 4 * MIB, 4 * MIB),
        (MIB, 4 * MIB, 2 * MIB + UNIT),
        (4 * MIB + 4096, MIB - 4096, 3 * MIB + UNIT - 4096),
        (UNIT, 3 * MIB, UNIT, 2 * MIB),
        (4 * MIB, UNIT),
        (3 * MIB + 4096,),
    ],
    ids=["equal", "rising", "with rests", "two of one unit", "one unit", "alone"],
)
@ENGINES
def test_members_of_unequal_size(
    engine: str,
    sizes: tuple[int, ...],
    make_files: Callable[..., list[str]],
    opened: Opener,
    rng: np.random.Generator,
) -> None:
    paths = make_files(len(sizes), 4096)
    for path, size in zip(paths, sizes, strict=True):
        os.truncate(path, size)
    fill(paths)
    vol = opened(paths, engine=engine, stripe_unit=UNIT)
    whole = sum(size // UNIT * UNIT for size in sizes) if len(sizes) > 1 else sizes[0]
    assert vol.size == whole
    content = random_traffic(vol, rng)
    vol.close()
    check_members(paths, content, UNIT)


@pytest.mark.root
@pytest.mark.parametrize(
    "sectors", [(512, 4096), (4096, 512, 512), (512, 512), (4096, 4096)], ids=str
)
@pytest.mark.parametrize("unit", [4096, UNIT], ids=["tiny units", "units of 64 KiB"])
def test_sectors_of_512_and_4096(
    unit: int,
    sectors: tuple[int, ...],
    make_loops: Callable[..., list[str]],
    opened: Opener,
    rng: np.random.Generator,
) -> None:
    """The coarsest member decides for the volume, and members of unequal size stay exact."""
    paths = [make_loops(1, (i + 1) * MIB, sector)[0] for i, sector in enumerate(sectors)]
    fill(paths)
    vol = opened(paths, stripe_unit=unit)
    assert [member.logical_block for member in vol.members] == list(sectors)
    assert vol.alignment % max(sectors) == 0
    for member, sector in zip(vol.members, sectors, strict=True):
        assert member.offset_align % sector == 0
    content = random_traffic(vol, rng)
    vol.close()
    check_members(paths, content, unit)


@pytest.mark.root
def test_sector_that_only_one_member_has_is_served_by_a_copy_or_refused(
    make_loops: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    """What suits the 512-byte member and not the 4096-byte one, on either of them."""
    paths = [make_loops(1, 2 * MIB, 512)[0], make_loops(1, 2 * MIB, 4096)[0]]
    vol = opened(paths, stripe_unit=UNIT)
    content = Content(vol, rng)
    into = aligned(512)
    for start in (512, UNIT + 512, UNIT - 512, 2 * UNIT - 512):
        assert vol.pread(into, start) == 512
        same(into, content.image[start : start + 512], f"sector at {start}")
        with pytest.raises(ValueError, match="multiples of"):
            vol.pwrite(into, start)
    assert vol.stats().bounced == 4
    content.check(0, vol.size)
    vol.close()
    strict = opened(paths, stripe_unit=UNIT, unaligned="refuse")
    with pytest.raises(ValueError, match="unaligned='refuse'"):
        strict.pread(into, 512)
    strict.close()
    for unit in (512, 1024, 2048):
        with pytest.raises(ValueError, match="alignment of the members"):
            kvio.Volume.open(paths, stripe_unit=unit)


class Guarded:
    """Memory of n bytes, ``skew`` bytes beyond a page border, with canaries on both sides."""

    def __init__(self, n: int, skew: int) -> None:
        self._whole = aligned(n + 2 * 8192)
        self._whole[:] = CANARY
        self._span = slice(4096 + skew, 4096 + skew + n)
        self.bytes = self._whole[self._span]

    def check(self, where: str) -> None:
        before, after = self._whole[: self._span.start], self._whole[self._span.stop :]
        for side in (before[-4096:], after[:4096]):
            assert (side == CANARY).all(), f"{where}: written outside the buffer"


@ENGINES
def test_unaligned_reads_touch_nothing_else(
    engine: str, make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    """Offsets and lengths around every border there is; addresses with every kind of skew."""
    paths = make_files(3, MIB)
    os.truncate(paths[1], 2 * MIB + UNIT)
    vol = opened(paths, engine=engine, stripe_unit=UNIT)
    content = Content(vol, rng)
    borders = [0, 512, 4096, UNIT, 3 * UNIT, 3 * MIB, 3 * MIB + UNIT, vol.size]  # 3 MiB: a zone's
    for turn in range(200):
        start = int(rng.choice(borders)) + int(rng.integers(-700, 700))
        length = int(
            rng.choice([1, 100, 511, 512, 513, 4095, 4096, 4097, UNIT, UNIT + 1, 5 * UNIT])
        )
        start, skew = max(start, 0), int(rng.choice([0, 0, 1, 3, 8, 511, 512, 4095]))
        buffer = Guarded(length, skew)
        where = f"turn {turn}: {length} bytes at {start}, skew {skew}"
        expected = content.image[start : start + length]
        if turn % 3:
            assert vol.pread(buffer.bytes, start) == expected.size, where
        else:
            got = vol.submit_read([start], [buffer.bytes]).wait(20)
            assert got.tolist() == [expected.size], where
        same(buffer.bytes[: expected.size], expected, where)
        assert (buffer.bytes[expected.size :] == CANARY).all(), f"{where}: beyond the result"
        buffer.check(where)


@ENGINES
def test_write_that_is_not_aligned_changes_nothing(
    engine: str, make_files: Callable[..., list[str]], opened: Opener, rng: np.random.Generator
) -> None:
    vol = opened(make_files(2, MIB), engine=engine, stripe_unit=UNIT)
    content = Content(vol, rng)
    data = aligned(2 * UNIT)
    end = vol.size
    for start, length in [(1, 4096), (0, 4095), (0, 1), (512, 4096), (UNIT - 512, 1024),
                          (UNIT, UNIT + 1), (end - 1, 1), (end - 4096, 4095)]:  # fmt: skip
        if start % vol.alignment == 0 == length % vol.alignment:
            continue
        for write in (
            lambda s, d: vol.pwrite(d, s),
            lambda s, d: vol.write_batch([0, s], [content.page_aligned(0, 4096), d]),
            lambda s, d: vol.submit_write([s], [d]),
        ):
            with pytest.raises(ValueError, match="multiples of"):
                write(start, data[:length])
    content.check(0, vol.size)
    assert vol.alignment > 1
    for skew in (1, 8, 256):  # the memory alone: copied
        part = aligned(2 * UNIT, skew=skew)
        part[:] = np.frombuffer(rng.bytes(part.size), np.uint8)
        before = vol.stats().bounced
        content.write(UNIT, part)
        assert vol.stats().bounced == before + 1
    content.check(0, vol.size)


def pieces_of(rng: np.random.Generator, n: int, exact: bool, grain: int) -> list[Guarded]:
    """n pieces, aligned in address and length, or else with a sum that is a multiple of grain."""
    if exact:
        return [Guarded(int(k) * grain, 0) for k in rng.integers(0, 3 if n < 500 else 2, n)]
    lengths = rng.integers(0, max(2, 900_000 // n), n).tolist()
    lengths[-1] += -sum(lengths) % grain
    return [Guarded(int(k), int(s)) for k, s in zip(lengths, rng.integers(0, 600, n), strict=True)]


@ENGINES
@pytest.mark.parametrize("exact", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("n", [1, 2, 64, 1025, 2500])
def test_scatter_and_gather(
    n: int,
    exact: bool,
    engine: str,
    make_files: Callable[..., list[str]],
    opened: Opener,
    rng: np.random.Generator,
) -> None:
    """The kernel takes 1024 pieces a command; more are several commands."""
    vol = opened(make_files(3, 4 * MIB), engine=engine, stripe_unit=UNIT)
    content = Content(vol, rng)
    grain = vol.alignment
    for turn in range(2):
        pieces = pieces_of(rng, n, exact, grain)
        total = sum(piece.bytes.size for piece in pieces)
        start = int(rng.integers(0, (vol.size - total) // grain + 1)) * grain
        if not exact and turn:
            start += int(rng.integers(0, 700)) if total + 700 < vol.size - start else 0
        parts: list[Any] = [piece.bytes for piece in pieces]
        got = (
            vol.submit_read([start], [parts]).wait(30) if turn else vol.read_batch([start], [parts])
        )
        assert got.tolist() == [total]
        joined = np.concatenate(parts)
        same(joined, content.image[start : start + total], f"{n} pieces at {start}")
        for piece in pieces:
            piece.check(f"turn {turn}")
            piece.bytes[:] = np.frombuffer(rng.bytes(piece.bytes.size), np.uint8)
        start -= start % grain
        got = vol.write_batch([start], [tuple(parts)])
        assert got.tolist() == [total]
        content.image[start : start + total] = np.concatenate(parts)
    content.check(0, vol.size)


def test_two_scattered_pages_with_one_buffer_used_twice(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """Gathering may name the same memory again and again (a page of zeros)."""
    vol = opened(make_files(2, 2 * MIB), stripe_unit=UNIT)
    zeros, ones = aligned(4096), aligned(4096)
    ones[:] = 1
    parts = [zeros, ones] * 100
    assert vol.write_batch([0, MIB], [parts, parts[::-1]]).tolist() == [200 * 4096] * 2
    into = aligned(200 * 4096)
    assert vol.pread(into, MIB) == into.size
    assert into.reshape(100, 2, 4096).mean(axis=(0, 2)).tolist() == [1.0, 0.0]


@pytest.mark.root
@ENGINES
@pytest.mark.parametrize("way", ["pread", "submit", "scattered", "unaligned"])
def test_one_large_read_goes_to_all_members_at_once(
    way: str, engine: str, require_root: None, rng: np.random.Generator
) -> None:
    """Goal: a page larger than the stripe unit uses all members together. Method: all of them
    stall; a member that is asked only after another has answered would never be asked."""
    with FaultDevice(2 * MIB) as a, FaultDevice(2 * MIB) as b, FaultDevice(2 * MIB) as c:
        disks = [a, b, c]
        with kvio.Volume.open(
            [disk.device for disk in disks], mode="rw", engine=engine, stripe_unit=UNIT
        ) as vol:
            content = Content(vol, rng)
            into = aligned(6 * UNIT)
            start = 100 if way == "unaligned" else 0
            scattered = [into[i * 8192 : (i + 1) * 8192] for i in range(into.size // 8192)]
            stalls = [disk.stall("read") for disk in disks]

            def read() -> None:
                if way == "submit":
                    assert vol.submit_read([start], [into]).wait(30).tolist() == [into.size]
                elif way == "scattered":
                    assert vol.read_batch([start], [scattered]).tolist() == [into.size]
                else:
                    assert vol.pread(into, start) == into.size

            with in_thread(read):
                try:
                    for disk in disks:
                        disk.wait_stalled(1)
                finally:
                    for stall in stalls:
                        stall.remove()
            same(into, content.image[start : start + into.size], "after all have answered")
