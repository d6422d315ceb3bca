"""Measures one peer in a process of its own, so that the processor time is its alone.

python bench/peer_worker.py NAME FILE     answers requests on stdin, one JSON line each
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.peers import PEERS, REQUESTERS, Peer, PreadvLoop, SkipError


def _offsets(peer: Peer, count: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return (rng.integers(0, peer.size // peer.block, count) * peer.block).tolist()


def _stamped(peer: Peer, offset: int, slot: int) -> bool:
    """compare.py writes its own number into each 4 KiB of the file."""
    return int(peer.slots[slot][:8].view(np.uint64)[0]) == offset // 4096


def _repeat(read: Callable[[Any], None], places: Sequence[Any], until: float) -> list[float]:
    """Reads on until the time is over; the seconds that each call took."""
    took = []
    clock = time.perf_counter
    i, now = 0, clock()
    while now < until:
        read(places[i % len(places)])
        before, now = now, clock()
        took.append(now - before)
        i += 1
    return took


class _Span:
    """Elapsed and processor time of this process since begin()."""

    def begin(self) -> None:
        self.usage = resource.getrusage(resource.RUSAGE_SELF)
        self.start = time.perf_counter()

    def end(self) -> tuple[float, float]:
        seconds = time.perf_counter() - self.start
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - self.usage.ru_utime - self.usage.ru_stime
        return seconds, cpu


def _threads(peer: Peer, seconds: float, seed: int, span: _Span) -> list[float]:
    took: list[float] = []
    failures: list[BaseException] = []
    ready = threading.Barrier(REQUESTERS, action=span.begin)

    def requester(slot: int) -> None:
        try:
            read = peer.reader(slot)
            places = _offsets(peer, 4096, seed * REQUESTERS + slot)
            read(places[-1])
            ready.wait()
            took.extend(_repeat(read, places, time.perf_counter() + seconds))
        except BaseException as error:
            failures.append(error)
            ready.abort()

    crew = [threading.Thread(target=requester, args=(slot,)) for slot in range(REQUESTERS)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if failures:
        broken = threading.BrokenBarrierError  # what the others get
        raise next(error for error in failures if not isinstance(error, broken))
    return took


def measure(peer: Peer, shape: str, seconds: float, seed: int) -> dict[str, Any]:
    """One run: GB/s, CPU seconds per GB of this process, 99th percentile of a call's time."""
    if shape == "16 requesters" and type(peer) is PreadvLoop:
        raise SkipError("a loop is one requester")
    each = REQUESTERS if shape == "batches of 16" else 1
    span = _Span()
    if shape == "16 requesters":
        took = _threads(peer, seconds, seed, span)
    else:
        places: list[Any] = _offsets(peer, 4096 * each, seed)
        if each > 1:
            places = [places[i : i + each] for i in range(0, len(places), each)]
        read: Any = peer.batch() if each > 1 else peer.reader(0)
        read(places[-1])
        span.begin()
        took = _repeat(read, places, time.perf_counter() + seconds)
    elapsed, cpu = span.end()
    nbytes = len(took) * each * peer.block
    return {
        "gbps": nbytes / elapsed / 1e9,
        "cpu_per_gb": cpu / (nbytes / 1e9),
        "p99_us": float(np.percentile(took, 99)) * 1e6,
        "calls": len(took),
    }


def verify(peer: Peer) -> None:
    """One read by each of the ways, looked at: a peer that reads nothing must not win."""
    place = _offsets(peer, 1, 12345)[0]
    peer.slots[0][:] = 0xA5
    peer.reader(0)(place)
    if not _stamped(peer, place, 0):
        raise OSError(f"the bytes that were read at {place} are wrong")
    places = _offsets(peer, REQUESTERS, 54321)
    peer.memory[:] = 0xA5
    peer.batch()(places)
    if not all(_stamped(peer, at, slot) for slot, at in enumerate(places)):
        raise OSError("the bytes that a batch has read are wrong")


def serve(name: str, path: str) -> None:
    """Answers requests {page, shape, seconds, seed, verify} with a measurement or {skip}."""
    peer: Peer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if peer is None or peer.block != request["page"]:
                if peer is not None:
                    peer.close()
                peer = PEERS[name](path, request["page"])
                if request["verify"]:
                    verify(peer)
            answer = measure(peer, request["shape"], request["seconds"], request["seed"])
        except ImportError as error:
            answer = {"skip": f"not installed ({error})"}
        except SkipError as error:
            answer = {"skip": str(error)}
        except Exception as error:  # a peer's own failure is a result too
            last = (str(error).strip().splitlines() or [""])[-1].strip()
            answer = {"skip": f"failed: {type(error).__name__}: {last}"}
        print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
