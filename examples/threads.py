"""Several threads on one volume: each has a ring of its own, and none waits for another's lock."""

import random
import tempfile
import threading

import numpy as np

import kvio

PAGE = 128 << 10
PAGES = 256
THREADS = 8
READS = 200  # of each thread


def reader(vol: kvio.Volume, seed: int, buffer: kvio.Buffer, wrong: list[int]) -> None:
    """Reads pages at random and notes those that hold something else."""
    draw = random.Random(seed)
    words = buffer.numpy(np.uint64)
    for _ in range(READS):
        number = draw.randrange(PAGES)
        done = vol.pread(buffer, number * PAGE)  # without the GIL
        if done != PAGE or words[0] != number or words[-1] != number:
            wrong.append(number)


with tempfile.TemporaryDirectory() as folder:
    members = kvio.Volume.create([f"{folder}/member-{i}" for i in range(4)], size_bytes=8 << 20)
    with (
        kvio.BufferPool((PAGES + THREADS) * PAGE) as pool,
        kvio.Volume.open(members, mode="rw", direct="prefer") as vol,
    ):
        with pool.alloc(PAGES * PAGE) as out:
            out.numpy(np.uint64).reshape(PAGES, -1)[:] = np.arange(PAGES)[:, None]
            assert (vol.write_batch(np.arange(PAGES) * PAGE, out) == PAGE).all()

        before = vol.stats()
        wrong: list[int] = []
        readers = [
            threading.Thread(target=reader, args=(vol, seed, pool.alloc(PAGE), wrong))
            for seed in range(THREADS)
        ]
        for thread in readers:
            thread.start()
        for thread in readers:
            thread.join()

        added = vol.stats().delta(before)
        assert not wrong, f"pages with other contents: {wrong}"
        assert added.read.ops == THREADS * READS
        assert added.read.errors == 0
        p99_ms = added.read.latency.percentile(99) / 1e6
        print(
            f"{THREADS} threads, {THREADS * READS} reads of {PAGE >> 10} KiB, p99 {p99_ms:.2f} ms"
        )
        for member in added.members:
            print(f"{member.path}: {member.read.bytes >> 20} MiB")
