"""asyncio: many batches under way at once, each awaited by the task that needs it."""

import asyncio
import tempfile

import numpy as np

import kvio

PAGE = 256 << 10
PAGES = 64


async def load(vol: kvio.Volume, number: int, buffer: kvio.Buffer) -> int:
    """Reads one page and returns its first word."""
    batch = vol.submit_read([number * PAGE], [buffer], deadline=10.0)
    done = await batch  # the loop runs other tasks meanwhile
    if done[0] != PAGE:
        raise batch.errors()[0] if batch.errors() else OSError(f"page {number}: {done[0]} bytes")
    return int(buffer.numpy(np.uint64)[0])


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        members = kvio.Volume.create([f"{folder}/member-{i}" for i in range(4)], size_bytes=4 << 20)
        with (
            kvio.BufferPool(2 * PAGES * PAGE) as pool,
            kvio.Volume.open(members, mode="rw", direct="prefer") as vol,
        ):
            with pool.alloc(PAGES * PAGE) as out:
                out.numpy(np.uint64).reshape(PAGES, -1)[:] = np.arange(PAGES)[:, None]
                written = await vol.submit_write(np.arange(PAGES) * PAGE, out)
                assert (written == PAGE).all()

            buffers = [pool.alloc(PAGE) for _ in range(PAGES)]
            words = await asyncio.gather(*(load(vol, n, buffers[n]) for n in range(PAGES)))
            assert words == list(range(PAGES))

            p50, p99 = vol.stats().read.latency.percentiles([50, 99])
            print(
                f"{PAGES} tasks read a page each: p50 {p50 / 1000:.0f} us, p99 {p99 / 1000:.0f} us"
            )


asyncio.run(main())
