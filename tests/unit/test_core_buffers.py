"""What the engine accepts as memory, and when a pool has it back."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import kvio


def test_arrays_of_python_objects_are_refused(tmp_path: Path) -> None:
    """They hold pointers: a read into one would make the interpreter follow data."""
    with kvio.Volume.open(
        kvio.Volume.create([tmp_path / "m"], size_bytes=65536), mode="rw", direct=False
    ) as vol:
        for call in (vol.pread, vol.pwrite):
            with pytest.raises(TypeError, match="Python objects"):
                call(np.array([object()] * 512), 0)
        with pytest.raises(TypeError, match=r"buffers\[0\]"):
            vol.read_batch([0], [np.array([None] * 512)])


def test_a_pool_gets_back_what_a_dropped_batch_held(tmp_path: Path) -> None:
    """Goal: no call of the volume is needed. The batch is dropped, its I/O ends, and the pool
    has room again."""
    paths = kvio.Volume.create([tmp_path / "m"], size_bytes=1 << 20)
    with kvio.Volume.open(paths, direct="prefer") as vol, kvio.BufferPool(1 << 20) as pool:
        batch = vol.submit_read([0] * 4, [pool.alloc(1 << 18) for _ in range(4)])
        batch.wait(20)
        del batch
        pool.alloc(1 << 18).free()
        held = vol.submit_read([0] * 4, [pool.alloc(1 << 18) for _ in range(4)])
        while not held.done():
            time.sleep(0.001)
        del held
        assert len(pool.alloc(4096)) == 4096
