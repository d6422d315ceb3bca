"""Everything at once, for a minute: threads and event loops on volumes of different engines, reads
and writes of all kinds, deadlines that pass and that do not, pools, registrations, opens beside it.
Every byte that is read is checked.

Method: traffic.py. The first failure ends the run and is told with its seed and the operation.
``KVIO_STRESS_SECONDS`` sets the time (60), ``KVIO_TEST_SEED`` the seed; threads make the order of a
run different each time all the same.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import kvio
from kvio.testing import LoopDevices
from tests.engine.lib import MIB, aligned, quarantine, wait_until
from tests.engine.traffic import PAGE, SLOT, THREADS, UNIT, AsyncWorker, Run, Worker, pattern

SECONDS = float(os.environ.get("KVIO_STRESS_SECONDS", "60"))


def start(run: Run, vol: kvio.Volume, first: int) -> list[tuple[Worker, threading.Thread]]:
    whole = aligned(vol.size)
    whole[:] = pattern(0, vol.size, 0)
    assert vol.pwrite(whole, 0) == vol.size
    kinds = [Worker] * (THREADS - 1) + [AsyncWorker]
    workers = [kind(run, vol, first + i) for i, kind in enumerate(kinds)]
    pairs = [(worker, threading.Thread(target=worker, daemon=True)) for worker in workers]
    for _, thread in pairs:
        thread.start()
    return pairs


def finish(run: Run, pairs: list[tuple[Worker, threading.Thread]]) -> None:
    for _, thread in pairs:
        thread.join(max(run.until - time.monotonic(), 0) + 100)
        assert not thread.is_alive(), f"a thread hangs: {[worker.doing for worker, _ in pairs]}"
    print({name: run.turns[name] for name in sorted(run.turns)})


@pytest.mark.stress
@pytest.mark.timeout(SECONDS + 120)
def test_random_mixed_traffic(make_files: Callable[..., list[str]], seed: int) -> None:
    run = Run(seed, SECONDS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run.pool)
        files = make_files(5, 3 * MIB)
        os.truncate(files[1], 5 * MIB + PAGE)
        layouts: list[tuple[list[str], dict[str, Any]]] = [
            (files[:3], {"engine": "auto"}),
            (files[3:], {"engine": "threads", "io_threads": 4}),
        ]
        if os.geteuid() == 0:
            loops = [stack.enter_context(LoopDevices(1, n * MIB, sector)).paths[0]
                     for n, sector in ((3, 4096), (6, 512))]  # fmt: skip
            layouts.append((loops, {"engine": "io_uring", "queue_depth": 4, "workers": 2}))
        volumes = [
            stack.enter_context(
                kvio.Volume.open(paths, mode="rw", direct="prefer", stripe_unit=UNIT, **options)
            )
            for paths, options in layouts
        ]
        pairs = [pair for i, vol in enumerate(volumes) for pair in start(run, vol, i * THREADS)]
        finish(run, pairs)
        assert not run.failure, f"KVIO_TEST_SEED={seed}: {run.failure}"
        for vol in volumes:
            wait_until(lambda vol=vol: quarantine(vol) == (0, 0), "what expired is over")
            stats = vol.stats()
            assert stats.poisoned_rings == stats.stale_completions == 0
            assert stats.read.bytes > 0
        for name in ("read_fixed", "many_submitted", "short_deadline_write", "awaits"):
            assert run.turns.get(name), f"there was no {name}"


@pytest.mark.stress
@pytest.mark.parametrize("where", ["read by all", "owned by one"])
def test_traffic_finds_a_wrong_byte(
    where: str, make_files: Callable[..., list[str]], seed: int
) -> None:
    """Goal: the traffic above can fail, and then ends at once. Method: one byte of a member is
    changed behind the volume's back."""
    run = Run(seed, 60)
    (path,) = make_files(1, 2 * MIB)
    with run.pool, kvio.Volume.open([path], mode="rw", direct="prefer", stripe_unit=UNIT) as vol:
        pairs = start(run, vol, 0)
        wait_until(lambda: run.turns.get("read_own", 0) > 3, "traffic")
        fd = os.open(path, os.O_WRONLY | os.O_DSYNC)
        while not run.over:  # an owner may have written over it before it was read
            place = 0 if where == "read by all" else vol.size // 4 // SLOT * SLOT
            for start_of_slot in range(place, place + vol.size // 4, SLOT):
                os.pwrite(fd, b"\0wrong", start_of_slot + 100)
        os.close(fd)
        finish(run, pairs)
        assert "wrong bytes" in run.failure or "block" in run.failure
        assert time.monotonic() < run.until, "it did not end early"
