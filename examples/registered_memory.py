"""Registered memory: a pool in huge pages, and memory of your own, that no I/O has to pin again."""

import mmap
import tempfile

import numpy as np

import kvio

SIZE = 4 << 20

with tempfile.TemporaryDirectory() as folder:
    members = kvio.Volume.create([f"{folder}/member-{i}" for i in range(2)], size_bytes=4 << 20)

    # Every volume knows every pool, whichever was there first.
    pool = kvio.BufferPool(8 << 20, hugepages="auto")
    print(f"pool: {pool.nbytes >> 20} MiB, huge pages: {pool.hugepages}")

    with kvio.Volume.open(members, mode="rw", direct="prefer") as vol:
        # The caller's own memory: shared memory, a pinned tensor, here an anonymous mapping. A page
        # border at its start lets O_DIRECT use it as it is.
        mine = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
        granted = vol.register(mine)
        print(f"own memory: {'registered' if granted else 'refused, so it is used unregistered'}")
        print(f"capabilities: {vol.capabilities['regions']} regions", end="")
        print(f", {vol.capabilities['register_refused'] or 'none refused'}")

        mine[:] = np.random.default_rng(1).integers(256, size=SIZE, dtype=np.uint8)
        assert vol.pwrite(mine, 0) == SIZE
        with pool.alloc(SIZE) as page:
            # Any part of a registered region will do.
            assert vol.read_batch([0, SIZE // 2], page).sum() == SIZE
            assert np.array_equal(page.numpy(), mine)

        # Commands of rings only: the threads engine has nothing to register with.
        stats = vol.stats()
        print(f"ring commands: {stats.fixed_ops} registered, {stats.unfixed_ops} not")
        print(f"preadv/pwritev: {stats.direct_ops}; through a bounce buffer: {stats.bounced}")
        vol.unregister(mine)
    pool.close()
