"""What else reads pages from Python, each behind the same calls; compare.py measures them.

Nothing of this project is imported here but for the peer `kvio`: the others run under whatever
interpreter has numpy and them. Every peer reads with O_DIRECT into the same kind of memory
(anonymous, transparent huge pages, touched) and is set up as its own documentation says.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

REQUESTERS = 16
LARGEST = 2 << 20

Read = Callable[[int], None]
ReadMany = Callable[[Sequence[int]], None]


class SkipError(Exception):
    """Why a peer, or one of its ways to read, cannot be measured here."""


class Peer(ABC):
    """Reads blocks of a file into slots of one memory area.

    ``reader(slot)`` is called in the thread that uses the result; ``batch()`` reads as many blocks
    as there are offsets, into the slots in order.
    """

    def __init__(self, path: str, block: int) -> None:
        self.path, self.block = path, block
        self.size = os.path.getsize(path)
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory gets no huge pages
        self.area = mmap.mmap(-1, REQUESTERS * LARGEST + LARGEST, flags=private)
        self.area.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self.area, np.uint8)
        start = -whole.ctypes.data % LARGEST
        self.memory = whole[start : start + REQUESTERS * block]
        self.memory[::4096] = 1
        self.slots = list(self.memory.reshape(REQUESTERS, block))

    @abstractmethod
    def reader(self, slot: int) -> Read: ...

    @abstractmethod
    def batch(self) -> ReadMany: ...

    def close(self) -> None:
        os.close(self.fd)

    def check(self, moved: int) -> None:
        if moved != self.block:
            raise OSError(f"{moved} of {self.block} bytes were read")


class Kvio(Peer):
    """kvio.Volume, its defaults; the memory is registered."""

    def __init__(self, path: str, block: int) -> None:
        super().__init__(path, block)
        import kvio

        self.volume = kvio.Volume.open([path])
        self.volume.register(self.memory)

    def reader(self, slot: int) -> Read:
        pread, buffer = self.volume.pread, self.slots[slot]
        return lambda offset: self.check(pread(buffer, offset))

    def batch(self) -> ReadMany:
        read_batch, memory = self.volume.read_batch, self.memory

        def read(offsets: Sequence[int]) -> None:
            self.check(int(read_batch(offsets, memory).min()))

        return read

    def close(self) -> None:
        self.volume.close()
        super().close()


class PreadvLoop(Peer):
    """os.preadv, one after the other."""

    def reader(self, slot: int) -> Read:
        fd, buffers = self.fd, [self.slots[slot]]
        return lambda offset: self.check(os.preadv(fd, buffers, offset))

    def batch(self) -> ReadMany:
        readers = [PreadvLoop.reader(self, slot) for slot in range(REQUESTERS)]

        def read(offsets: Sequence[int]) -> None:
            for call, offset in zip(readers, offsets, strict=True):
                call(offset)

        return read


class PreadvPool(PreadvLoop):
    """os.preadv in a ThreadPoolExecutor of 16; requesters call it in their own threads."""

    def __init__(self, path: str, block: int) -> None:
        super().__init__(path, block)
        self.pool = ThreadPoolExecutor(REQUESTERS)

    def batch(self) -> ReadMany:
        readers = [self.reader(slot) for slot in range(REQUESTERS)]
        pool = self.pool

        def read(offsets: Sequence[int]) -> None:
            for done in [pool.submit(call, at) for call, at in zip(readers, offsets, strict=True)]:
                done.result()

        return read

    def close(self) -> None:
        self.pool.shutdown()
        super().close()


class Liburing(Peer):
    """The PyPI package liburing (2024.5.3; the wheels of 2026 need AVX-512 and have another
    interface): a ring for each thread, SINGLE_ISSUER and DEFER_TASKRUN, memory not registered.
    """

    SETUP_FLAGS = 1 << 12 | 1 << 13  # SINGLE_ISSUER, DEFER_TASKRUN: it has no names for them

    def __init__(self, path: str, block: int) -> None:
        import liburing

        if not hasattr(liburing, "io_uring"):
            raise SkipError("another interface: pip install liburing==2024.5.3")
        super().__init__(path, block)
        self.lib = liburing

    def _reads(self, slots: Sequence[int]) -> ReadMany:
        lib = self.lib
        ring, cqe = lib.io_uring(), lib.io_uring_cqe()
        lib.io_uring_queue_init(REQUESTERS, ring, self.SETUP_FLAGS)
        get_sqe, prep_read = lib.io_uring_get_sqe, lib.io_uring_prep_read
        fd, count, block = self.fd, len(slots), self.block
        buffers = [memoryview(self.slots[slot]) for slot in slots]

        def read(offsets: Sequence[int]) -> None:
            for buffer, offset in zip(buffers, offsets, strict=True):
                prep_read(get_sqe(ring), fd, buffer, block, offset)
            lib.io_uring_submit_and_wait(ring, count)
            for _ in range(count):
                lib.io_uring_wait_cqe(ring, cqe)
                self.check(cqe.res)
                lib.io_uring_cqe_seen(ring, cqe)

        return read

    def reader(self, slot: int) -> Read:
        read = self._reads([slot])
        return lambda offset: read([offset])

    def batch(self) -> ReadMany:
        return self._reads(range(REQUESTERS))


class Kvikio(Peer):
    """KvikIO in POSIX mode (KVIKIO_COMPAT_MODE=ON), 16 threads, direct reads, numpy arrays."""

    def __init__(self, path: str, block: int) -> None:
        os.environ.setdefault("KVIKIO_COMPAT_MODE", "ON")
        import kvikio
        import kvikio.defaults

        super().__init__(path, block)
        kvikio.defaults.set(
            {"compat_mode": True, "num_threads": REQUESTERS, "auto_direct_io_read": True}
        )
        self.file = kvikio.CuFile(path, "r")

    def reader(self, slot: int) -> Read:
        pread, buffer, block = self.file.pread, self.slots[slot], self.block
        return lambda offset: self.check(pread(buffer, block, offset).get())

    def batch(self) -> ReadMany:
        pread, slots, block = self.file.pread, self.slots, self.block

        def read(offsets: Sequence[int]) -> None:
            for done in [pread(slot, block, at) for slot, at in zip(slots, offsets, strict=True)]:
                self.check(done.get())

        return read

    def close(self) -> None:
        self.file.close()
        super().close()


class Nixl(Peer):
    """NIXL's POSIX plugin: descriptor lists prepared once, a transfer for each call, polled.

    Between two looks at the state it sleeps for 20 us: without that, 16 polling threads hold the
    GIL all the time.
    """

    backend: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, path: str, block: int) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        agent, config = self._module()
        super().__init__(path, block)
        self._agent_class, self._config = agent, config
        self._lock = threading.Lock()
        self._count = 0

    @staticmethod
    def _module() -> Any:
        for name in ("nixl_cu12", "nixl_cu13", "nixl"):
            try:
                module = __import__(name)
                return module.nixl_agent, module.nixl_agent_config
            except ImportError as error:
                reason = error
        raise SkipError(f"not installed ({reason})")

    def _reads(self, slots: Sequence[int]) -> ReadMany:
        with self._lock:
            self._count += 1
            agent = self._agent_class(f"peer{self._count}", self._config(backends=[]))
        agent.create_backend("POSIX", dict(self.backend))
        base, block = self.memory.ctypes.data, self.block
        agent.register_memory([(base, self.memory.nbytes, 0, "")], "DRAM", backends=["POSIX"])
        agent.register_memory([(0, self.size, self.fd, "")], "FILE", backends=["POSIX"])
        local = agent.prep_xfer_dlist(
            "NIXL_INIT_AGENT", [(base + i * block, block, 0) for i in slots], "DRAM"
        )
        places = range(0, self.size - block + 1, block)
        remote = agent.prep_xfer_dlist(agent.name, [(at, block, self.fd) for at in places], "FILE")
        numbers = list(range(len(slots)))

        def read(offsets: Sequence[int]) -> None:
            handle = agent.make_prepped_xfer(
                "READ", local, numbers, remote, [at // block for at in offsets]
            )
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(20e-6)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(f"the transfer ended with {state}")
            agent.release_xfer_handle(handle)

        return read

    def reader(self, slot: int) -> Read:
        read = self._reads([slot])
        return lambda offset: read([offset])

    def batch(self) -> ReadMany:
        return self._reads(range(REQUESTERS))


class NixlUring(Nixl):
    """The same, over io_uring."""

    backend = {"use_uring": "true"}  # noqa: RUF012


class NixlAio(Nixl):
    """The same, over Linux AIO."""

    backend = {"use_aio": "true"}  # noqa: RUF012


PEERS: dict[str, type[Peer]] = {
    "kvio": Kvio,
    "preadv loop": PreadvLoop,
    "preadv pool": PreadvPool,
    "liburing (PyPI)": Liburing,
    "KvikIO POSIX": Kvikio,
    "NIXL POSIX uring": NixlUring,
    "NIXL POSIX aio": NixlAio,
}
