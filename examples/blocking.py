"""Blocking calls: one page over all members, a batch of pages, and what a result means."""

import tempfile

import numpy as np

import kvio

PAGE = 4 << 20  # four stripe units: one page uses all four members at once
PAGES = 8

with tempfile.TemporaryDirectory() as folder:
    # Files are made in full and written through, so that later writes only overwrite.
    members = kvio.Volume.create([f"{folder}/member-{i}" for i in range(4)], size_bytes=8 << 20)

    with (
        kvio.BufferPool(2 * PAGES * PAGE) as pool,
        kvio.Volume.open(members, mode="rw", direct="prefer") as vol,
        pool.alloc(PAGES * PAGE) as out,
        pool.alloc(PAGES * PAGE) as back,
    ):
        print(f"{len(vol.members)} members, {vol.size >> 20} MiB, engine {vol.engine}")

        # No name is given to the view: a buffer goes back to its pool when no view of it is left.
        out.numpy(np.uint64).reshape(PAGES, -1)[:] = np.arange(PAGES)[:, None]

        # One call for all pages. A buffer is cut into as many equal parts as there are offsets.
        offsets = np.arange(PAGES, dtype=np.int64) * PAGE
        done = vol.write_batch(offsets, out)
        assert (done == PAGE).all(), done
        vol.flush()

        # The results are bytes or -errno, one for each operation. Less than asked is no page.
        errors: list[kvio.KvioError] = []
        done = vol.read_batch(offsets, back, errors=errors)
        assert (done == PAGE).all(), errors
        assert np.array_equal(back.numpy(), out.numpy())
        print(f"read_batch: {PAGES} pages of {PAGE >> 20} MiB, all equal")

        # A call for one range raises what goes wrong; the end of the volume is a short read.
        tail = bytearray(1 << 20)
        assert vol.pread(tail, vol.size - 4096) == 4096
        assert vol.pread(tail, vol.size) == 0
        try:
            vol.pwrite(bytes(4096), vol.size)
        except kvio.KvioError as error:
            print(f"as expected: {error.error_class}, errno {error.errno}: {error}")
        else:
            raise AssertionError("a write beyond the end went through")

        stats = vol.stats()
        for member in stats.members:
            print(f"{member.path}: {member.read.ops} reads, {member.read.bytes >> 20} MiB")
