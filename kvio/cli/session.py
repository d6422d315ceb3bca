"""One open volume with the buffers of one job."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import kvio
from kvio.cli import offsets
from kvio.cli.common import BenchError, UsageError, format_size
from kvio.cli.jobs import COPY_SEED, MAX_DEPTH, Job
from kvio.cli.verify import Contents, parse_pattern

Bytes = npt.NDArray[np.uint8]

# A batch of checked blocks needs a buffer for each of its blocks.
_VERIFY_BYTES = 32 << 20

# What most devices take in one command; the guess before they are open.
_USUAL_IO_BYTES = 1 << 20

_CLOSE_S, _CLOSE_HURRY_S = 30.0, 3.0


@dataclass(frozen=True, slots=True)
class Region:
    """The part of the volume that one job works on, in bytes."""

    start: int
    length: int


def resolve_region(job: Job, volume_bytes: int, copy: int) -> Region:
    """Turn offset, offset_increment and size into a range of the volume.

    Raises
    ------
    UsageError
        The range does not lie inside the volume, or holds no block.
    """
    block = max(job.read_bs, job.write_bs)

    def extent(value: tuple[str, int]) -> int:
        kind, amount = value
        return amount if kind == "bytes" else volume_bytes * amount // 100 // block * block

    start = extent(job.offset) + job.offset_increment * copy
    length = extent(job.size) if job.size is not None else max(0, volume_bytes - start)
    if start + length > volume_bytes:
        if start >= volume_bytes or job.size is None or job.size[0] == "bytes":
            raise UsageError(
                f"job {job.name}: offset {format_size(start)} + size {format_size(length)} is "
                f"more than the volume holds ({format_size(volume_bytes)} over "
                f"{len(job.members)} member(s))"
            )
        length = volume_bytes - start
    if length < block:
        raise UsageError(
            f"job {job.name}: the region of {format_size(length)} at {format_size(start)} "
            f"holds no block of {format_size(block)}"
        )
    return Region(start, length)


class Buffers:
    """Memory for the blocks in flight, cut into equal pieces.

    ``slots`` batches are in flight at a time. Where contents matter each has pieces of its own;
    otherwise all share ``iodepth`` pieces, as many as fio would use. A mix reads into a second set,
    so that it never writes what it has read.
    """

    def __init__(
        self, job: Job, *, mem_align: int, slots: int, largest_batch: int, private: bool
    ) -> None:
        self.block = max(job.read_bs, job.write_bs)
        align = max(512, mem_align)
        self._stride = -(-self.block // align) * align
        self._private = private
        self._pieces = largest_batch if private else min(job.iodepth, largest_batch)
        sets = slots if private else 2 if job.mixed else 1
        nbytes = self._stride * self._pieces * sets
        self.hugepages = "none"
        self._pool: Any = None
        self._buffer: Any = None
        if job.fixedbufs:
            pages: Any = job.hugepages
            self._pool = kvio.BufferPool(nbytes, hugepages=pages)
            self._buffer = self._pool.alloc(nbytes)
            self.hugepages = str(self._pool.hugepages)
            self.memory: Bytes = self._buffer.numpy(dtype=np.uint8)
        else:
            self.memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        base = int(self.memory.ctypes.data)
        cycle = np.arange(largest_batch, dtype=np.uint64) % np.uint64(self._pieces)
        self._addresses = np.uint64(base) + cycle * np.uint64(self._stride)
        self._set_bytes = self._stride * self._pieces
        self._mixed = job.mixed

    def addresses(self, slot: int, direction: int, count: int) -> npt.NDArray[np.uint64]:
        """Where the blocks of a batch of ``count`` lie. ``direction``: 0 reads, 1 writes."""
        index = slot if self._private else int(self._mixed and direction == 0)
        if not index:
            return self._addresses[:count]
        return self._addresses[:count] + np.uint64(index * self._set_bytes)

    def piece(self, slot: int, index: int, size: int) -> Bytes:
        """The bytes of one block of a batch, where each batch has pieces of its own."""
        start = self._set_bytes * slot + index * self._stride
        return self.memory[start : start + size]

    def close(self) -> None:
        """Give the memory back; nothing may be in flight."""
        del self.memory
        if self._buffer is not None:
            self._buffer.free()
            self._pool.close()


def write_contents(job: Job, buffers: Buffers) -> None:
    """Fill all buffers with what an unverified job writes."""
    if job.zero_buffers or not job.writes:
        buffers.memory[:] = 0  # touches every page, so that no fault is measured
    elif job.buffer_pattern is not None:
        pieces = [piece or b"" for piece in parse_pattern(job.buffer_pattern)]
        pattern = np.frombuffer(b"".join(pieces) or b"\0", np.uint8)
        buffers.memory[:] = np.resize(pattern, buffers.memory.size)
    else:
        rng = np.random.default_rng(job.seed)
        step = 1 << 24
        for start in range(0, buffers.memory.size, step):
            part = buffers.memory[start : start + step]
            part[:] = rng.integers(0, 256, part.size, dtype=np.uint8)


def commands_per_block(job: Job, max_io_bytes: Sequence[int]) -> int:
    """Commands that one block becomes: it is cut at stripe units, and at what a member takes.

    ``max_io_bytes`` is of each member; where they differ this is the mean, rounded up.
    """
    block = max(job.read_bs, job.write_bs)
    piece = block if len(job.members) == 1 else min(block, job.stripe_unit)
    commands = sum(-(-piece // largest) for largest in max_io_bytes)
    return -(-block // piece) * -(-commands // len(max_io_bytes))


def open_volume(job: Job, *, copies: int, allow_destroy: bool) -> Any:
    """Open the job's members with the depth that fio would have.

    fio counts blocks in flight, the engine counts commands; how many commands a block becomes is
    known when the members are open, so some volumes are opened twice.

    Raises
    ------
    UsageError, BenchError
        With a message that names the member and the remedy.
    """
    needed = job.iodepth * copies * commands_per_block(job, [_USUAL_IO_BYTES])
    while True:
        depth = min(MAX_DEPTH, needed)
        volume = _open(job, depth, allow_destroy)
        largest = [member.max_io_bytes for member in volume.members]
        needed = job.iodepth * copies * commands_per_block(job, largest)
        if min(MAX_DEPTH, needed) <= depth:
            return volume
        volume.close()


def _open(job: Job, depth: int, allow_destroy: bool) -> Any:
    options: dict[str, Any] = {
        "stripe_unit": job.stripe_unit,
        "mode": "rw" if job.changes_members else "r",
        "direct": job.direct,
        "engine": job.engine,
        "queue_depth": depth,
        "max_inflight": depth,
        "submit_batch": job.submit_batch,
        "deadline": job.deadline_s,
        "allow_destroy": allow_destroy,
        "workers": job.workers,
        "iopoll": job.hipri,
        "sqpoll": job.sqpoll,
    }
    if job.engine == "threads":
        options["io_threads"] = max(1, min(256, depth))
    try:
        return kvio.Volume.open(list(job.members), **options)
    except kvio.KvioError as error:
        raise BenchError(f"job {job.name}: {error}") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"job {job.name}: {error}") from None


def batch_limits(job: Job, contents: Contents | None, *, commands: int) -> tuple[int, int, int]:
    """How a job's I/O is cut into batches: (batches in flight, smallest, largest batch).

    There is always more submitted than the engine may have in flight (``iodepth``), so that its
    queue never drains between batches. One direction takes two batches of tens of milliseconds. A
    mix takes four of ``iodepth``, at least 8: the engine lets reads overtake writes, and a longer
    queue would become phases of reads and of writes. A rate needs batches that are short in time.
    Only one large block at a time is really alone: the engine would begin the next one while the
    last commands of the first are in flight.
    """
    if job.iodepth == 1 and commands > 1:
        return 1, 1, 1
    if not is_paced(job) and contents is None:
        return 2, job.iodepth, max(job.iodepth, 65536)
    batch = max(8, job.iodepth) if job.mixed else job.iodepth
    limited = [rate for rate in iops_limits(job) if rate]
    if limited:
        batch = max(1, min(batch, int(min(limited) * 0.002)))
    if contents is not None:
        batch = max(1, min(batch, _VERIFY_BYTES // max(job.read_bs, job.write_bs)))
    return max(4 if is_paced(job) else 2, -(-2 * job.iodepth // batch)), batch, batch


def is_paced(job: Job) -> bool:
    """True for a mix, and for a job with a rate: what plan.Paced runs."""
    return (job.mixed and not job.verify_only) or any(iops_limits(job))


def iops_limits(job: Job) -> tuple[float, float]:
    """I/Os a second that reads and writes may reach; 0 = no limit."""
    limits = []
    for bandwidth, iops, block in zip(
        job.rate, job.rate_iops, (job.read_bs, job.write_bs), strict=True
    ):
        both = [value for value in (bandwidth / block, float(iops)) if value > 0]
        limits.append(min(both, default=0.0))
    return limits[0], limits[1]


def make_streams(
    job: Job, regions: Sequence[Region]
) -> tuple[offsets.OffsetStream, offsets.OffsetStream]:
    """The streams of reads and writes; a random mix of equal blocks shares one.

    Several regions are the copies of a job that share one volume; their offsets interleave.
    """

    def stream(block: int, extra: int) -> offsets.OffsetStream:
        parts = [
            offsets.make_stream(
                start=region.start,
                length=region.length,
                block_size=block,
                random=job.random,
                distribution=job.distribution,
                norandommap=job.norandommap,
                seed=job.seed + extra + copy * COPY_SEED,
            )
            for copy, region in enumerate(regions)
        ]
        joined = parts[0] if len(parts) == 1 else offsets.Interleaved(parts)
        return offsets.Prefetched(joined) if is_paced(job) else joined

    reads = stream(job.read_bs, 0)
    if job.random and job.read_bs == job.write_bs:
        return reads, reads
    return reads, stream(job.write_bs, 1)


def check_alignment(job: Job, regions: Sequence[Region], volume: Any) -> None:
    """Refuse writes of parts of a block before anything is written.

    Raises
    ------
    UsageError
        The block size, or the start of the region, is not a multiple of the members' blocks.
    """
    align = max(member.write_align for member in volume.members)
    for name, value in [("bs", job.write_bs), *(("offset", region.start) for region in regions)]:
        if value % align:
            raise UsageError(
                f"job {job.name}: {name}={value} is not a multiple of {align}, "
                "the block that the members write as a whole"
            )


def close_volume(volume: Any, *, hurry: bool) -> str:
    """Close the volume. Returns what is wrong when I/O never came back, '' otherwise.

    With a deadline (``hurry``) the answers of a stalled member are not waited for much longer.
    """
    try:
        volume.close(timeout=_CLOSE_HURRY_S if hurry else _CLOSE_S)
    except (kvio.KvioError, TimeoutError) as error:
        return str(error)
    return ""
