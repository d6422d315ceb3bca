"""Thousands of opens, threads, batches, pools, loops and failures: as many descriptors and threads
afterwards as before, and no growth of memory.

Method: a child runs one thing many times to warm up, then many times more, and compares. The bound
is 1 MiB of anonymous memory for the second part: noise of the allocator, and 1 to 5 KiB a turn, so
that a lane, a ring or a page that is forgotten each time shows.
test_the_measurement_itself checks that it can fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvio
from tests.engine.conftest import Opener
from tests.engine.lib import KIB, MIB, aligned, quarantine, run_child, wait_until
from tests.support.faultdev import FaultDevice

BOUND = MIB
# glibc gives threads arenas of their own, which fill up over thousands of threads: not ours
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}

MEASURE = """
import asyncio, random
paths, engine = sys.argv[3:], sys.argv[2]
def volume(**options):
    return kvio.Volume.open(paths, **{"mode": "r", "direct": "prefer", "engine": engine,
                                      "stripe_unit": 65536, "io_threads": 4, **options})
vol = None
threads = native_threads()
def open_descriptors():
    gc.collect()
    return len(descriptors())
def measure(turn, warm, n, bound=int(sys.argv[1])):
    for _ in range(warm):
        turn()
    before, memory = open_descriptors(), resident_bytes()
    for _ in range(n):
        turn()
    wait_until(lambda: open_descriptors() <= before, f"descriptors {before} {descriptors()}")
    # the kernel gives the memory of a ring back some time after its end
    wait_until(lambda: resident_bytes() - memory <= bound,
               f"{resident_bytes() - memory} bytes more after {n} turns")
    if vol:
        vol.close()
    wait_until(lambda: native_threads() <= threads, "threads end")
    print("ok")
page = aligned(65536)
two = [aligned(32768), aligned(32768)]
"""

TURNS: dict[str, tuple[str, int, int]] = {
    "open and close": (
        """
def turn():
    volume().close()
""",
        100,
        1000,
    ),
    "open, use and close": (
        """
def turn():
    with volume() as vol:
        vol.read_batch([0, 65536], two)
        vol.submit_read([0, 65536], two).wait(20)
        vol.stats()
""",
        100,
        1000,
    ),
    "open for writing, use and close": (
        """
def turn():
    with volume(mode="rw") as vol:
        vol.write_batch([0, 65536], two)
        vol.submit_write([0, 65536], two).wait(20)
        vol.flush()
""",
        20,
        100,
    ),
    "open, use and drop": (
        """
def turn():
    vol = volume()
    batch = vol.submit_read([0, 65536], two)
    vol.pread(page, 0)
    if random.random() < 0.5:
        batch.wait(20)
""",
        100,
        400,
    ),
    "opens that fail": (
        """
def turn():
    for members in (paths + ["/nowhere"], paths + paths[:1], ["/dev/null"]):
        try:
            kvio.Volume.open(members, direct="prefer", engine=engine)
        except kvio.KvioError:
            pass
""",
        50,
        300,
    ),
    "threads that come and go": (
        """
vol = volume()
def body():
    vol.read_batch([0, 65536], [aligned(4096), aligned(4096)])
def turn():
    threads = [threading.Thread(target=body) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
""",
        30,
        200,
    ),
    "batches of every kind": (
        """
vol = volume(mode="rw")
def turn():
    vol.read_batch([0, 65536], two)
    vol.pread(page, 0)
    vol.pread(bytearray(1000), 77)
    vol.submit_read([0, 1], [two[0], bytearray(10)]).wait(20)
    vol.submit_write([0], [page])
    vol.read_batch([0], [[two[0], two[1]]], deadline=30)
    errors = []
    vol.write_batch([vol.size, 0], two, errors=errors)
    vol.stats()
""",
        400,
        1000,
    ),
    "wrong arguments": (
        """
vol = volume(unaligned="refuse")
def turn():
    for offsets, buffers in (([0], [None]), ([0, 1], two), ([0], two), ([-1], [page]),
                             ([0.5], [page]), ([0, 0], [page, b"x"]), (None, None),
                             ([0, 0], [[page, page], [page, 3]])):
        for call in (vol.read_batch, vol.submit_read):
            try:
                call(offsets, buffers)
                raise SystemExit(f"{offsets} was taken")
            except (ValueError, TypeError):
                pass
""",
        500,
        2000,
    ),
    "pools and registrations": (
        """
vol = volume()
memory = aligned(1 << 20)
def turn():
    with kvio.BufferPool(1 << 20) as pool, pool.alloc(65536) as buffer:
        vol.read_batch([0], [buffer])
        vol.register(memory)
        vol.submit_read([0, 65536], two).wait(20)
        vol.unregister(memory)
""",
        200,
        600,
    ),
    "event loops": (
        """
vol = volume()
async def one():
    await vol.submit_read([0, 65536], two)
async def everything():
    task = asyncio.create_task(one())
    await asyncio.gather(*(one() for _ in range(8)))
    task.cancel()
def turn():
    asyncio.run(everything())
""",
        100,
        400,
    ),
}


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
@pytest.mark.parametrize("name", TURNS)
def test_nothing_is_left_behind(
    name: str, engine: str, make_files: Callable[..., list[str]], tmp_path: Path
) -> None:
    code, warm, n = TURNS[name]
    out = run_child(
        f"{MEASURE}\n{code}\nmeasure(turn, {warm}, {n})",
        BOUND,
        engine,
        *make_files(2, MIB),
        timeout=120,
        environ=ONE_ARENA,
    )
    assert out.split() == ["ok"]


@pytest.mark.parametrize(
    "leak",
    ["kept.append(os.dup(0))", "kept.append(bytearray(1024))", "kept.append(volume())"],
    ids=["descriptor", "1 KiB", "volume"],
)
def test_the_measurement_itself(leak: str, make_files: Callable[..., list[str]]) -> None:
    """A leak a turn is found; else the tests above could not fail."""
    code = f"""
kept = []
real = wait_until
def wait_until(true, what, timeout=2):
    real(true, what, 0.2)
def turn():
    {leak}
try:
    measure(turn, 50, {60 if "volume" in leak else 1500})
except AssertionError:
    print("found")
"""
    paths = make_files(2, MIB)
    out = run_child(MEASURE + code, BOUND, "threads", *paths, timeout=60, environ=ONE_ARENA)
    assert out.split() == ["found"]


def test_references_to_buffers_and_offsets_come_back(
    make_files: Callable[..., list[str]], opened: Opener
) -> None:
    """Every way a call can end, good or bad, gives back what it was given."""
    vol = opened(make_files(2), stripe_unit=64 * KIB)
    given = [aligned(4096), bytearray(4096), [bytearray(10), bytearray(20)], np.arange(2) * 4096]
    one, other, nested, offsets = given
    before = [sys.getrefcount(thing) for thing in given]
    for _ in range(100):
        vol.read_batch(offsets, [one, other])
        vol.submit_read(offsets, [one, nested]).wait(20)
        vol.pread(one, 0)
        vol.write_batch([vol.size, 0], [one, one])
        for offs, buffers in (
            (offsets, [one, None]),
            (offsets, [nested, other, one]),
            ([0, -1], [one, nested]),
            (offsets, [one, [other, 5]]),
        ):
            for call in (vol.read_batch, vol.submit_read, vol.write_batch, vol.submit_write):
                with pytest.raises((ValueError, TypeError)):
                    call(offs, buffers)
    del offs, buffers, call
    assert [sys.getrefcount(thing) for thing in given] == before


def locked_pages() -> int:
    """Bytes that the kernel holds pinned for this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmPin in /proc/self/status")


def test_pinned_memory_is_given_back(make_files: Callable[..., list[str]], opened: Opener) -> None:
    """Goal: unregistering unpins, in the caller's ring and in the worker's; closing does too."""
    vol = opened(make_files(2, 2 * MIB), engine="io_uring")
    base = locked_pages()
    memory = aligned(8 * MIB)

    def touch() -> None:
        vol.read_batch([0, MIB], [memory[:4096], memory[4096:8192]])
        vol.submit_read([0, MIB], [memory[:4096], memory[4096:8192]]).wait(20)

    if not vol.register(memory):
        pytest.skip(f"needs a larger RLIMIT_MEMLOCK: {vol.capabilities['register_refused']}")
    touch()
    assert locked_pages() - base >= memory.nbytes, "it is pinned for each of the rings"
    for _ in range(20):
        vol.unregister(memory)
        touch()
        wait_until(lambda: locked_pages() <= base, "it is unpinned")
        vol.register(memory)
        touch()
    vol.close()
    wait_until(lambda: locked_pages() <= base, "closing unpins")


@pytest.mark.root
@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_a_thousand_reads_given_up_are_all_taken_back(
    engine: str, disk: FaultDevice, opened: Opener
) -> None:
    """Deadlines that pass one after the other on a member that does not answer, then it does."""
    vol = opened([disk.device], engine=engine, queue_depth=4096, io_threads=8)
    stall = disk.stall("read")
    buffers = [bytearray(4096) for _ in range(1000)]
    batches = [vol.submit_read([i * 4096], [buffer], deadline=0.2)
               for i, buffer in enumerate(buffers)]  # fmt: skip
    assert {int(batch.wait(20)[0]) for batch in batches} == {-62}
    assert vol.stats().deadline_exceeded == 1000
    assert quarantine(vol)[0] >= 1
    del batches
    stall.remove()
    wait_until(lambda: quarantine(vol) == (0, 0), "the quarantine ends")

    def all_free() -> bool:
        vol.stats()
        try:
            for buffer in buffers:
                buffer.append(0)
                buffer.pop()
        except BufferError:
            return False
        return True

    wait_until(all_free, "all buffers are given back")
    assert vol.read_batch([0], [buffers[0]]).tolist() == [4096]


def test_volume_stays_within_its_memory(make_files: Callable[..., list[str]]) -> None:
    """An open volume of four members with the caller's ring and a worker: 16 MiB at most, rings in
    the kernel not counted."""
    out = run_child(
        """
paths = sys.argv[1:]
with kvio.Volume.open(paths, direct="prefer") as first:  # imports, pools of the allocator
    first.submit_read([0], [aligned(4096)]).wait(20)
gc.collect()
before = resident_bytes()
buffers = aligned(64 * 4096)
vol = kvio.Volume.open(paths, direct="prefer")
for _ in range(200):
    vol.read_batch(np.arange(64) * 16384, buffers)
    vol.submit_read(np.arange(64) * 16384, buffers).wait(20)
print(resident_bytes() - before)
""",
        *make_files(4, MIB),
    )
    assert int(out) <= 16 * MIB


def test_kvio_is_what_is_measured() -> None:
    """The children import this kvio, not another one that is installed."""
    out = run_child("print(kvio.__file__)")
    assert Path(out.strip()).resolve() == Path(kvio.__file__).resolve()
