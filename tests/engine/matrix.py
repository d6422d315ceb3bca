"""What every engine must do alike, as functions of (open, rng): test_matrix.py runs them all.

Also a program, for processes in which io_uring is refused:
``python -m tests.engine.matrix SEED MEMBER...`` prints one JSON object, name -> "" or what failed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import sys
import threading
import traceback
from collections.abc import Callable

import numpy as np

import kvio
from tests.engine.lib import KIB, MIB, Content, aligned, same

Open = Callable[..., kvio.Volume]
Check = Callable[[Open, np.random.Generator], None]
UNIT = 64 * KIB


def spans(rng: np.random.Generator, size: int, n: int, grain: int, most: int) -> list[slice]:
    """n ranges inside [0, size), multiples of grain, at most ``most`` bytes long."""
    lengths = rng.integers(1, most // grain + 1, n) * grain
    starts = [int(rng.integers(0, (size - length) // grain + 1)) * grain for length in lengths]
    return [slice(start, start + int(n)) for start, n in zip(starts, lengths, strict=True)]


def check_blocking_calls_round_trip(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        for span in spans(rng, vol.size, 40, vol.alignment, MIB):
            fresh = aligned(span.stop - span.start)
            fresh[:] = np.frombuffer(rng.bytes(fresh.size), np.uint8)
            content.write(span.start, fresh)
            content.check(span.start, fresh.size)
        content.check(0, vol.size)
    with open_volume() as vol:  # also after a close
        content.vol = vol
        content.check(0, vol.size)


def check_batches_round_trip(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        page = 16 * KIB
        places = rng.permutation(vol.size // page)[:64] * page
        for way in ("list", "one", "addresses"):
            block = aligned(64 * page)
            block[:] = np.frombuffer(rng.bytes(block.size), np.uint8)
            parts = [block[i * page : (i + 1) * page] for i in range(64)]
            for place, part in zip(places, parts, strict=True):
                content.image[place : place + page] = part
            address = (block.ctypes.data + np.arange(64) * page).astype(np.uint64)
            buffers = {"list": parts, "one": block,
                       "addresses": (address, np.full(64, page, np.uint64))}[way]  # fmt: skip
            assert (vol.write_batch(places, buffers) == page).all()
            block[:] = 0
            assert (vol.read_batch(places, buffers) == page).all()
            for place, part in zip(places, parts, strict=True):
                same(part, content.image[place : place + page], f"{way}: page at {place}")
        content.check(0, vol.size)


def check_submitted_batches_round_trip(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        going = []
        for span in spans(rng, vol.size, 64, vol.alignment, 256 * KIB):
            into = aligned(span.stop - span.start)
            going.append((span, into, vol.submit_read([span.start], [into])))
        for span, into, batch in going:
            assert batch.wait(60).tolist() == [into.size]
            assert batch.done()
            assert batch.errors() == []
            same(into, content.image[span], f"read at {span.start}")
        data = content.page_aligned(0, UNIT)[::-1].copy()
        fresh = aligned(UNIT)
        fresh[:] = data
        assert vol.submit_write([UNIT], [fresh]).wait(60).tolist() == [UNIT]
        content.image[UNIT : 2 * UNIT] = data
        content.check(0, vol.size)


def check_unaligned_reads_are_exact(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        starts = [0, 1, 511, UNIT - 1, UNIT, 4 * UNIT - 3, vol.size - 1, vol.size - 4097]
        starts += rng.integers(0, vol.size - 300_000, 24).tolist()
        lengths = [1, 2, 4096, 3, UNIT + 1, 9 * UNIT, 1, 4097]
        lengths += rng.integers(1, 300_000, 24).tolist()
        skews = rng.integers(0, 64, 32).tolist()
        into = [aligned(n, skew=skew) for n, skew in zip(lengths, skews, strict=True)]
        assert vol.read_batch(starts, into).tolist() == lengths
        for start, part in zip(starts, into, strict=True):
            same(part, content.image[start : start + part.size], f"read at {start}")
        if vol.alignment > 1:
            assert vol.stats().bounced >= 8
        skewed = aligned(UNIT, skew=1)  # a write whose memory alone is unaligned
        skewed[:] = 7
        content.write(2 * UNIT, skewed)
        content.check(UNIT, 3 * UNIT)


def check_scatter_and_gather(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        grain = vol.alignment
        for pieces in (1, 2, 64, 300):
            parts = [aligned(int(n) * grain) for n in rng.integers(0, 4, pieces)]
            total = sum(part.size for part in parts)
            start = int(rng.integers(0, (vol.size - total) // grain + 1)) * grain
            assert vol.read_batch([start], [parts]).tolist() == [total]
            same(np.concatenate(parts), content.image[start : start + total], f"{pieces} pieces")
            for part in parts:
                part[:] = np.frombuffer(rng.bytes(part.size), np.uint8)
            assert vol.write_batch([start], [tuple(parts)]).tolist() == [total]
            content.image[start : start + total] = np.concatenate(parts)
        content.check(0, vol.size)


def check_the_end_of_the_volume(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        end, page = vol.size, 4096
        into = [aligned(2 * page) for _ in range(5)]
        starts = [end - 2 * page, end - page, end, end + page, 2**62]
        assert vol.read_batch(starts, into).tolist() == [2 * page, page, 0, 0, 0]
        same(into[1][:page], content.image[-page:], "the read across the end")
        assert not into[1][page:].any()
        failed: list[kvio.KvioError] = []
        got = vol.write_batch(starts[:4], into[:4], errors=failed)
        assert got.tolist() == [2 * page] + [-errno.ENOSPC] * 3
        assert [error.index for error in failed] == [1, 2, 3]
        assert all(error.error_class == "space" and error.op == "write" for error in failed)
        content.check(0, end)


def check_one_bad_operation_fails_alone(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        page = 4096
        block = aligned(64 * page)
        addresses = np.uint64(block.ctypes.data) + np.arange(64, dtype=np.uint64) * np.uint64(page)
        addresses[17] = 4096  # nothing is mapped there
        places = np.arange(64) * 3 * page
        failed: list[kvio.KvioError] = []
        got = vol.read_batch(places, (addresses, np.full(64, page, np.uint64)), errors=failed)
        assert got[17] == -errno.EFAULT
        assert (np.delete(got, 17) == page).all()
        assert [(e.index, e.errno, e.error_class) for e in failed] == [(17, errno.EFAULT, "usage")]
        for i in set(range(64)) - {17}:
            same(block[i * page : (i + 1) * page],
                 content.image[places[i] : places[i] + page], f"operation {i}")  # fmt: skip


def check_nothing_is_something_too(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        before = vol.stats()
        assert vol.read_batch([], []).tolist() == []
        assert vol.write_batch(np.array([], np.int64), []).tolist() == []
        assert vol.submit_read([], []).wait(10).tolist() == []
        assert asyncio.run(_await(vol.submit_write([], []))) == []
        assert vol.pread(bytearray(), 0) == 0
        assert vol.pwrite(b"", vol.size + 5) == 0
        assert vol.read_batch([0, 1, 2**62], [bytearray()] * 3).tolist() == [0, 0, 0]
        assert vol.read_batch([0, 4096], [[], ()]).tolist() == [0, 0]
        assert vol.stats().read.bytes == before.read.bytes


async def _await(batch: kvio.Batch) -> list[int]:
    return (await batch).tolist()


def check_flush_and_discard(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        vol.flush()
        before = vol.stats()
        vol.flush(deadline=30)
        assert [m.flushes for m in vol.stats().delta(before).members] == [1] * len(vol.members)
        if all(member.can_discard for member in vol.members):
            vol.discard(UNIT, 5 * UNIT)
            assert sum(m.discards for m in vol.stats().members) == len(vol.members)
        content.check(0, UNIT)  # what was not discarded is as it was
        content.check(6 * UNIT, vol.size - 6 * UNIT)


def check_many_threads(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)
        page, each = 16 * KIB, 12
        failures: list[str] = []

        def traffic(number: int) -> None:
            own = np.random.default_rng([int(content.image[0]), number])
            try:
                for turn in range(each):
                    start = int(own.integers(0, vol.size // 2 // page)) * page
                    into = aligned(page)
                    batch = vol.submit_read([start], [into]) if turn % 3 else None
                    got = batch.wait(60)[0] if batch else vol.pread(into, start)
                    assert got == page
                    same(into, content.image[start : start + page], f"thread {number}")
                    mine = vol.size // 2 + number * page
                    fresh = aligned(page)
                    fresh[:] = turn
                    assert vol.write_batch([mine], [fresh]).tolist() == [page]
                    assert vol.read_batch([mine, start], [into, fresh]).tolist() == [page, page]
                    assert (into == turn).all()
            except BaseException:
                failures.append(traceback.format_exc())

        threads = [threading.Thread(target=traffic, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]


def check_asyncio(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        content = Content(vol, rng)

        async def one(start: int) -> None:
            into = aligned(8 * KIB)
            assert (await vol.submit_read([start], [into])).tolist() == [8 * KIB]
            same(into, content.image[start : start + 8 * KIB], f"read at {start}")

        async def all_of_them() -> None:
            places = rng.integers(0, vol.size // (8 * KIB), 100) * 8 * KIB
            await asyncio.gather(*(one(int(place)) for place in places))

        asyncio.run(all_of_them())


def check_deadline_of_a_healthy_device(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume(deadline=60) as vol:
        content = Content(vol, rng)
        content.check(0, vol.size)
        assert vol.pread(aligned(4096), 0, deadline=30) == 4096
        stats = vol.stats()
        assert (stats.deadline_exceeded, stats.quarantined_buffers) == (0, 0)


def check_statistics_add_up(open_volume: Open, rng: np.random.Generator) -> None:
    with open_volume() as vol:
        Content(vol, rng)
        before = vol.stats()
        lengths = [4096, UNIT, 6 * UNIT, 2 * UNIT + 4096]
        for length in lengths:
            assert vol.pread(aligned(length), 0) == length
            assert vol.pwrite(aligned(length), 8 * UNIT) == length
        added = vol.stats().delta(before)
        for kind, io in (("read", added.read), ("write", added.write)):
            members = [getattr(member, kind) for member in added.members]
            assert (io.ops, io.bytes, io.errors) == (4, sum(lengths), 0)
            assert sum(m.bytes for m in members) == io.bytes
            assert sum(m.ops for m in members) >= 4
            assert io.latency.count == 4
            assert all(m.latency.count == m.ops for m in members)
            assert 0 < io.latency.min_ns <= io.latency.percentile(50) <= io.latency.max_ns
        assert sum(m.in_flight for m in added.members) == 0


def check_pool_memory(open_volume: Open, rng: np.random.Generator) -> None:
    with kvio.BufferPool(4 * MIB) as pool, open_volume() as vol:
        content = Content(vol, rng)
        with pool.alloc(MIB) as one, pool.alloc(MIB) as other:
            assert vol.pread(one, MIB) == MIB
            same(one, content.image[MIB : 2 * MIB], "registered memory")
            assert vol.read_batch([0, 2 * MIB], [one, other]).tolist() == [MIB, MIB]
            same(other, content.image[2 * MIB : 3 * MIB], "registered memory, batch")
            assert vol.submit_write([MIB], [other]).wait(60).tolist() == [MIB]
        content.image[MIB : 2 * MIB] = content.image[2 * MIB : 3 * MIB]
        content.check(0, vol.size)


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


def main(seed: str, *members: str) -> None:
    def open_volume(**options: object) -> kvio.Volume:
        wanted = {"mode": "rw", "direct": "prefer", "stripe_unit": UNIT, **options}
        return kvio.Volume.open(list(members), **wanted)  # type: ignore[arg-type]

    report = {}
    with open_volume() as vol:
        report["engine"] = vol.engine
        report["reasons"] = [member.engine_reason for member in vol.members]
        report["refused"] = vol.capabilities["io_uring_refused"]
    for name, check in CHECKS.items():
        try:
            check(open_volume, np.random.default_rng(int(seed)))
            report[name] = ""
        except BaseException:
            report[name] = traceback.format_exc()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
