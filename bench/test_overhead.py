"""What the engine itself costs: nanoseconds an operation, and memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from bench import work
from bench.harness import Sample, Target, alternate, report, scaled

KIB = 1 << 10
MIB = 1 << 20
BATCH = 64
LOOP_OPS = 1_000_000


@pytest.fixture(scope="module")
def c_loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C loop over liburing, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    program = tmp_path_factory.mktemp("c") / "nop_loop"
    source = Path(__file__).with_name("nop_loop.c")
    subprocess.run(
        [compiler, "-std=c11", "-O2", "-o", str(program), str(source), "-luring"], check=True
    )
    return program


def run_c(program: Path, block: int, fixed: bool) -> Sample:
    """Processor time is what counts: neither side sleeps, and it hardly depends on others."""
    words = [str(program), "/dev/zero", str(block), str(BATCH), str(LOOP_OPS), str(int(fixed))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    cpu_ns = float(done.stdout.split()[1])
    return Sample(LOOP_OPS * block, LOOP_OPS, cpu_ns * LOOP_OPS / 1e9)


def run_kvio(vol: kvio.Volume, block: int, memory: Any, ops: int) -> Sample:
    offsets = np.arange(BATCH, dtype=np.int64) * block
    read = vol.read_batch
    for _ in range(200):
        moved = read(offsets, memory)
    work.check_moved(moved, block)
    calls = ops // BATCH
    start = time.thread_time()
    for _ in range(calls):
        read(offsets, memory)
    return Sample(calls * BATCH * block, calls * BATCH, time.thread_time() - start)


def shaped(memory: kvio.Buffer, block: int, shape: str) -> Any:
    """The same memory in each of the ways that read_batch takes."""
    if shape == "one buffer":
        return memory
    if shape == "list":
        whole = memoryview(memory)
        return [whole[i * block : (i + 1) * block] for i in range(BATCH)]
    places = np.arange(BATCH, dtype=np.uint64) * np.uint64(block) + np.uint64(memory.address)
    return (places, np.full(BATCH, block, np.uint64))


@pytest.mark.parametrize("block", [512, 4 * KIB])
@pytest.mark.parametrize("registered", [True, False], ids=["registered", "plain"])
@pytest.mark.parametrize("shape", ["one buffer", "list", "addresses"])
def test_engine_overhead(
    benchmark: Any,
    request: pytest.FixtureRequest,
    c_loop: Path,
    block: int,
    registered: bool,
    shape: str,
) -> None:
    """Batches of 64 reads of /dev/zero from Python, against a C loop over liburing."""
    with (
        kvio.Volume.open(["/dev/zero"], engine="io_uring") as vol,
        work.page_memory(BATCH * block) as memory,
    ):
        if not registered:
            vol.unregister(memory._pool)
        buffers = shaped(memory, block, shape)
        before = vol.stats()
        result = alternate(
            benchmark,
            lambda: run_c(c_loop, block, registered),
            lambda: run_kvio(vol, block, buffers, scaled(LOOP_OPS)),
        )
        stats = vol.stats()
        fixed = (stats.fixed_ops - before.fixed_ops) > 0
        buffers = None
    assert fixed == registered
    c_ns, ns = (result.median(side, lambda sample: sample.ns_per_op) for side in "ab")
    over = float(
        np.median([b.ns_per_op - a.ns_per_op for a, b in zip(result.a, result.b, strict=True)])
    )
    benchmark.extra_info.update({"ns/op": round(ns, 1), "C ns/op": round(c_ns, 1),
                                 "ns/op above C": round(over, 1)})  # fmt: skip
    name = f"{block} B from /dev/zero, {'registered' if registered else 'plain'}, {shape}"
    report(request, f"{name}, ns an op above the C loop", over, Target(most=120),
           f"kvio {ns:.0f} ns, C {c_ns:.0f} ns")  # fmt: skip


_MEMORY_SCRIPT = """
import json, sys
import numpy as np
import kvio

def resident():
    fields = open("/proc/self/smaps_rollup").read().split()
    return int(fields[fields.index("Rss:") + 1]) / 1024

memory = np.zeros(64 * 4096 + 4096, np.uint8)
start = -memory.ctypes.data % 4096
memory = memory[start:start + 64 * 4096]
offsets = np.arange(64, dtype=np.int64) * 4096
kvio.Volume.open(["/dev/zero"]).close()  # what the first open loads is not the volume's
base = resident()
vol = kvio.Volume.open(json.loads(sys.argv[1]))
for _ in range(100):
    vol.read_batch(offsets, memory)
    vol.submit_read(offsets, memory).wait()
opened = resident()
for _ in range(int(sys.argv[2]) // 128):
    vol.read_batch(offsets, memory)
    vol.submit_read(offsets, memory).wait()
later = resident()
print(json.dumps([opened - base, later - opened]))
"""


def measure_memory(paths: list[str], ops: int) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY_SCRIPT, json.dumps(paths), str(ops)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    opened, growth = json.loads(done.stdout)
    return opened, growth


@pytest.mark.parametrize("members", ["four_loops", "four_files"])
def test_memory_of_an_open_volume(
    benchmark: Any, request: pytest.FixtureRequest, members: str
) -> None:
    """Resident memory of a volume of four members after its first reads, and after 1 M more."""
    paths = request.getfixturevalue(members)
    ops = scaled(1_000_000 if members == "four_loops" else 100_000)
    out: list[tuple[float, float]] = []
    benchmark.pedantic(lambda: out.append(measure_memory(paths, ops)), rounds=1, iterations=1)
    opened, growth = out[-1]
    benchmark.extra_info.update({"MiB": round(opened, 2), "MiB more later": round(growth, 2)})
    report(request, f"resident MiB of an open volume, {members}", opened, Target(most=16),
           "with two lanes in use, pools aside")  # fmt: skip
    report(request, f"resident MiB more after {ops} operations, {members}", growth,
           Target(most=0.5), "no growth wanted")  # fmt: skip
