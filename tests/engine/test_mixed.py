"""Volumes whose members are not alike: zram beside a loop device, a file beside a device, sectors
and sizes that differ. They must do all that uniform ones do.

Method: the checks of matrix.py, with engine="auto" choosing for each member.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvio
from kvio.testing import LoopDevices
from tests.engine import matrix
from tests.engine.lib import KIB, MIB, aligned
from tests.support import images, zram

pytestmark = pytest.mark.root


@pytest.fixture
def members(kind: str) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Paths, and the options that these members need."""
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(LoopDevices(1, 3 * MIB)).paths[0]
        if kind == "zram and loop":
            reason = zram.unavailable()
            if reason:
                pytest.skip(reason)
            yield [stack.enter_context(zram.zram_device(4 * MIB)), loop], {}
        elif kind == "tmpfs and loop":
            folder = stack.enter_context(images.mounted("tmpfs", size_bytes=16 * MIB))
            (path,) = kvio.Volume.create([folder / "member"], size_bytes=4 * MIB)
            yield [loop, path], {"direct": False}
        else:
            coarse = stack.enter_context(LoopDevices(1, 2 * MIB, sector=4096)).paths[0]
            folder = stack.enter_context(images.mounted("ext4", size_bytes=32 * MIB))
            (path,) = kvio.Volume.create([folder / "member"], size_bytes=5 * MIB)
            yield [coarse, path, loop], {}


@pytest.mark.parametrize("kind", ["zram and loop", "tmpfs and loop", "ext4 and sectors"])
@pytest.mark.parametrize("name", matrix.CHECKS)
def test_mixed_volume(
    name: str, members: tuple[list[str], dict[str, Any]], rng: np.random.Generator
) -> None:
    paths, needs = members

    def open_volume(**options: Any) -> kvio.Volume:
        options = {"mode": "rw", "stripe_unit": matrix.UNIT, **needs, **options}
        return kvio.Volume.open(paths, **options)

    matrix.CHECKS[name](open_volume, rng)


@pytest.mark.parametrize("kind", ["zram and loop"])
def test_zram_gets_threads_and_the_loop_device_a_ring(
    members: tuple[list[str], dict[str, Any]],
) -> None:
    """The kernel hands zram's I/O to io-wq, one command after the other; the reason is told."""
    paths, _ = members
    with kvio.Volume.open(paths, mode="rw", stripe_unit=64 * KIB) as vol:
        assert [member.engine for member in vol.members] == ["threads", "io_uring"]
        assert vol.engine == "mixed"
        assert "io-wq" in vol.members[0].engine_reason
        before = vol.stats()
        assert vol.read_batch([0, 64 * KIB], aligned(128 * KIB)).tolist() == [64 * KIB] * 2
        added = vol.stats().delta(before)
        assert (added.direct_ops, added.fixed_ops + added.unfixed_ops) == (1, 1)
    with kvio.Volume.open([paths[0]], mode="rw") as vol:
        assert vol.engine == "threads"
