"""The striped volume and memory for I/O: what ``import kvio`` gives."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvio import _core
from kvio.errors import make_error
from kvio.files import create_members
from kvio.stats import Histogram, MemberStats, OpStats, VolumeStats

__all__ = ["Batch", "Buffer", "BufferPool", "Member", "Volume"]

_DIRECT = {True: 0, "prefer": 1, False: 2}
_ENGINES = {"auto": 0, "io_uring": 1, "threads": 2, "io_uring_cmd": 3}
_UNALIGNED = {"bounce": 0, "refuse": 1}
_HUGEPAGES = {"auto": 0, "require": 1, "off": 2}

# Every open volume knows every live pool, so that pool memory is registered in all rings.
_registry_lock = threading.Lock()
_volumes: weakref.WeakSet[Volume] = weakref.WeakSet()
_pools: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def _choice(name: str, value: Any, table: dict[Any, int]) -> int:
    try:
        return table[value]
    except (KeyError, TypeError):
        allowed = ", ".join(repr(key) for key in table)
        raise ValueError(f"{name}={value!r}: one of {allowed} expected") from None


def _count(name: str, value: int | None, *, least: int = 1, most: int = 2**32 - 1) -> int:
    """None is 0, the core's word for its default."""
    if value is None:
        return 0
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: an integer expected")
    number = value.__index__()
    if not least <= number <= most:
        raise ValueError(f"{name}={number}: must lie between {least} and {most}")
    return number


@dataclass(frozen=True)
class Member:
    """One member as it was opened. Sizes and alignments in bytes.

    ``mem_align`` is of buffer addresses, ``offset_align`` of a read's offset and length,
    ``write_align`` of a write's. ``direct`` is what the kernel reports after the open.
    ``engine_reason`` says why ``engine`` was picked. ``nowait_read``: the kernel serves reads
    without handing them to io-wq. ``sparse``: a file with holes, where writes are slow at first.
    """

    path: str
    size_bytes: int
    logical_block: int
    physical_block: int
    mem_align: int
    offset_align: int
    write_align: int
    max_io_bytes: int
    direct: bool
    engine: str
    engine_reason: str
    nowait_read: bool
    volatile_cache: bool
    can_discard: bool
    sparse: bool
    identity: str


class Batch(_core.Batch):
    """Operations under way, from :meth:`Volume.submit_read` or :meth:`Volume.submit_write`.

    ``done()``, ``wait(timeout)`` or ``await batch``; then ``results()`` and ``errors()``. The
    buffers stay exported until the engine has let go of them, also when the batch is dropped.
    """

    def __await__(self) -> Generator[Any, None, npt.NDArray[np.int64]]:
        if not self.done():
            yield from self._readable().__await__()
        return self.results()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        fd = self._eventfd()
        ready = loop.create_future()
        loop.add_reader(fd, _set_ready, ready)
        try:
            await ready
        finally:
            loop.remove_reader(fd)


def _set_ready(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Volume(_core.Volume):
    """N members striped into one range of bytes. Thread-safe; see :meth:`open`.

    Offsets and lengths are bytes in the volume. Aligned ones (``alignment``) are fastest; others
    are served through a bounce buffer, except writes of part of a block, which are refused. A read
    that crosses the end is short, one beyond it gives 0; a write beyond it fails with ENOSPC.

    ``buffers`` is a list with a buffer for each offset (or a list of buffers: the range is
    scattered over them in order), or one buffer that is cut into equal parts, or a tuple
    ``(addresses, lengths)`` of two uint64 arrays (then the caller keeps the memory alive). They are
    C-contiguous, for reads also writable; they are not copied.

    Results are int64, one for each operation: bytes, or -errno. ``errors=[...]`` collects a
    :class:`KvioError` for each failed one.
    """

    _batch_class = Batch

    @staticmethod
    def create(
        paths: Sequence[str | os.PathLike[str]], *, size_bytes: int, overwrite: bool = False
    ) -> list[str]:
        """Make preallocated, written-through files as members.

        Parameters
        ----------
        paths : sequence of path
            Files to make. None of them may exist, unless ``overwrite`` is given.
        size_bytes : int
            Size of each, a multiple of 4096.
        overwrite : bool
            Replace regular files that exist.

        Returns
        -------
        list of str
            The paths.

        Raises
        ------
        ValueError
            Bad size or no paths.
        KvioError
            A file exists or cannot be made; files made by this call are removed again.
        """
        return create_members(paths, size_bytes=size_bytes, overwrite=overwrite)

    @classmethod
    def open(
        cls,
        members: Sequence[str | os.PathLike[str]],
        *,
        stripe_unit: int = 1 << 20,
        mode: Literal["r", "rw"] = "r",
        direct: bool | Literal["prefer"] = True,
        engine: Literal["auto", "io_uring", "threads", "io_uring_cmd"] = "auto",
        queue_depth: int = 64,
        max_inflight: int | None = None,
        max_inflight_bytes: int | None = None,
        submit_batch: int | None = None,
        deadline: float | None = None,
        allow_destroy: bool = False,
        unaligned: Literal["bounce", "refuse"] = "bounce",
        workers: int | None = None,
        io_threads: int = 16,
        iopoll: bool = False,
        sqpoll: bool = False,
    ) -> Volume:
        """Open members as one volume.

        Parameters
        ----------
        members : sequence of path
            Block devices, preallocated files, ``/dev/ngXnY``; their order is the layout. Members
            of different sizes are used whole: the larger ones stripe on among themselves.
        stripe_unit : int
            Bytes on one member before the next; a power of two, a multiple of the alignment.
        mode : {"r", "rw"}
            ``"rw"`` claims block devices (O_EXCL) and refuses members that are mounted, held,
            partitioned or carry a foreign signature.
        direct : bool or "prefer"
            O_DIRECT: demanded, not wanted, or taken where the file system has it.
        engine : str
            ``"auto"`` probes each member: io_uring, or preadv threads where the kernel would hand
            the reads to its own threads anyway, or where io_uring is refused.
        queue_depth, max_inflight : int
            Commands in flight for each member, and over all members, of one calling thread or
            worker.
        max_inflight_bytes : int, optional
            The same in bytes.
        submit_batch : int, optional
            Completions to gather before more is submitted; chosen by depth when None.
        deadline : float, optional
            Seconds, for every call: then the call ends with ETIME, and the buffers stay in
            quarantine until the member answers.
        allow_destroy : bool
            Write to members that hold data (never to mounted or held ones).
        unaligned : {"bounce", "refuse"}
            Serve unaligned reads and buffers through a copy, or refuse them.
        workers, io_threads : int
            Threads for submitted batches (None: by members and processors), and at most for the
            preadv engine, flush and discard. They start when needed.
        iopoll, sqpoll : bool
            Polled completions (the device needs poll queues); a kernel thread that submits.

        Raises
        ------
        ValueError
            Bad options.
        KvioError
            A member cannot be used; the message names it, the reason and the remedy.
        """
        if isinstance(members, (str, bytes, os.PathLike)):
            raise TypeError(f"members: a list of paths expected, not one path: [{members!r}]?")
        if mode not in ("r", "rw"):
            raise ValueError(f"mode={mode!r}: 'r' or 'rw' expected")
        self = cls.__new__(cls)
        self._open(
            list(members),
            stripe_unit=_count("stripe_unit", stripe_unit, most=2**63),
            write=mode == "rw",
            direct=_choice("direct", direct, _DIRECT),
            engine=_choice("engine", engine, _ENGINES),
            queue_depth=_count("queue_depth", queue_depth, most=4096),
            max_inflight=_count("max_inflight", max_inflight, most=4096),
            max_inflight_bytes=_count("max_inflight_bytes", max_inflight_bytes, most=2**63),
            submit_batch=_count("submit_batch", submit_batch, most=4096),
            deadline=deadline,
            allow_destroy=bool(allow_destroy),
            unaligned=_choice("unaligned", unaligned, _UNALIGNED),
            workers=_count("workers", workers, most=256),
            io_threads=_count("io_threads", io_threads, most=1024),
            iopoll=bool(iopoll),
            sqpoll=bool(sqpoll),
        )
        info = self._info()
        self._size = info["size_bytes"]
        self._stripe_unit = info["stripe_unit"]
        self._alignment = max(info["write_align"], info["read_align"], info["mem_align"])
        self._mode = mode
        self._members = tuple(
            Member(**self._member_info(i)) for i in range(info["n_members"])
        )
        with _registry_lock:
            _volumes.add(self)
            pools = list(_pools)
        for pool in pools:
            self._register_quietly(pool)
        return self

    @property
    def size(self) -> int:
        """Bytes in the volume."""
        return self._size

    @property
    def members(self) -> tuple[Member, ...]:
        """The members in layout order."""
        return self._members

    @property
    def stripe_unit(self) -> int:
        """Bytes on one member before the next."""
        return self._stripe_unit

    @property
    def alignment(self) -> int:
        """Bytes that offsets, lengths and buffer addresses should be multiples of."""
        return self._alignment

    @property
    def mode(self) -> str:
        """``"r"`` or ``"rw"``."""
        return self._mode

    @property
    def engine(self) -> str:
        """The members' engine, or ``"mixed"``."""
        engines = {member.engine for member in self._members}
        return engines.pop() if len(engines) == 1 else "mixed"

    @property
    def capabilities(self) -> dict[str, Any]:
        """What was really granted, and why not where it was not (JSON-able)."""
        info = self._info()
        out = {name: info[name] for name in (
            "read_align", "write_align", "mem_align", "queue_depth", "max_inflight", "workers",
            "io_threads", "registered_files", "registered_ring_fd", "registered_buffers",
            "regions")}
        out["io_uring"] = bool(info["uring"])
        out["io_uring_refused"] = _reason(info["uring_errno"])
        out["register_refused"] = _register_reason(info["register_errno"])
        out["setup_flags"] = _setup_flags(info["ring_flags"]) if info["uring"] else []
        out["direct"] = all(member.direct for member in self._members)
        out["members"] = {
            member.path: {"engine": member.engine, "reason": member.engine_reason,
                          "direct": member.direct} for member in self._members}
        return out

    def stats(self) -> VolumeStats:
        """Counters and latency histograms since the open, as an immutable value."""
        counters, read, write, members = self._stats()
        return VolumeStats(
            read=_op_stats(read),
            write=_op_stats(write),
            members=tuple(
                MemberStats(path=member.path, read=_op_stats(r), write=_op_stats(w),
                            flushes=c["flushes"], discards=c["discards"], retries=c["retries"],
                            in_flight=c["in_flight"], suspect=c["strikes"] >= 3)
                for member, (r, w, c) in zip(self._members, members, strict=True)
            ),
            **counters,
        )

    def register(self, buffer: Any) -> bool:
        """Register memory with every ring of the volume, so that I/O on it needs no page pinning.

        Parameters
        ----------
        buffer : BufferPool or buffer
            Contiguous writable memory. It must stay alive until :meth:`unregister` or close.

        Returns
        -------
        bool
            False when the kernel refused (RLIMIT_MEMLOCK): I/O then works unregistered, and
            ``capabilities["register_refused"]`` has the limit and the remedy.

        Raises
        ------
        KvioError
            It overlaps memory that is registered already, or all 64 slices of 1 GiB are taken.
        """
        address, nbytes = _range_of(buffer)
        return self._register(address, nbytes) == 0

    def unregister(self, buffer: Any) -> None:
        """Undo :meth:`register`. Rings of idle threads drop it with their next call."""
        self._unregister(_range_of(buffer)[0])

    def _register_quietly(self, pool: BufferPool) -> None:
        try:
            self.register(pool)
        except OSError as exc:
            if exc.errno != errno.EEXIST:
                self._pool_refused = str(exc)

    def __enter__(self) -> Volume:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None,
                 tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<kvio.Volume closed>"
        return (f"<kvio.Volume {len(self._members)} members, {self._size} bytes, "
                f"{self.engine}, mode={self._mode!r}>")


def _range_of(buffer: Any) -> tuple[int, int]:
    if isinstance(buffer, BufferPool):
        return buffer.address, buffer.nbytes
    address, nbytes = _core.buffer_range(buffer)
    if nbytes == 0:
        raise ValueError("there is nothing to register in an empty buffer")
    return address, nbytes


def _reason(number: int) -> str:
    return f"{errno.errorcode.get(number, number)}: {os.strerror(number)}" if number else ""


def _register_reason(number: int) -> str:
    if number != errno.ENOMEM:
        return _reason(number)
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return (f"ENOMEM: more than RLIMIT_MEMLOCK allows ({soft} bytes); raise it with `ulimit -l` or "
            f"LimitMEMLOCK=")


_SETUP_FLAGS = ("IOPOLL", "SQPOLL", "SQ_AFF", "CQSIZE", "CLAMP", "ATTACH_WQ", "R_DISABLED",
                "SUBMIT_ALL", "COOP_TASKRUN", "TASKRUN_FLAG", "SQE128", "CQE32", "SINGLE_ISSUER",
                "DEFER_TASKRUN")


def _setup_flags(bits: int) -> list[str]:
    return [name for i, name in enumerate(_SETUP_FLAGS) if bits >> i & 1]


def _op_stats(raw: tuple[Any, ...]) -> OpStats:
    ops, nbytes, errors, hist = raw
    return OpStats(ops, nbytes, errors, Histogram(*hist))


class Buffer(_core.Slice):
    """A part of a :class:`BufferPool`: buffer protocol, ``numpy()``, context manager.

    It goes back to the pool by ``free()``, at the end of a ``with`` block, or when collected.
    """

    _pool: BufferPool

    def numpy(self, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
        """A view of the memory as a one-dimensional array of ``dtype``."""
        return np.frombuffer(self, dtype=dtype)

    def free(self) -> None:
        """Give the memory back.

        Raises
        ------
        BufferError
            Views of it exist, or I/O on it is in flight.
        """
        if self._retire():
            self._pool._give_back(self.start, self.nbytes)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None,
                 tb: TracebackType | None) -> None:
        self.free()

    def __del__(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None and self._retire():
            pool._give_back(self.start, self.nbytes)


class BufferPool(_core.Memory):
    """Aligned memory for I/O in huge pages where they can be had, registered in every ring.

    Parameters
    ----------
    nbytes : int
        Bytes to map, rounded up to the page size that is granted.
    hugepages : {"auto", "require", "off"}
        hugetlb pages, then transparent huge pages, then 4 KiB pages; only hugetlb; only 4 KiB.

    Raises
    ------
    KvioError
        The memory cannot be had (``hugepages="require"`` without free hugetlb pages).
    """

    ALIGNMENT = 4096
    _SLICE = 1 << 30  # the kernel registers at most 1 GiB at once: no buffer straddles a border

    def __init__(
        self, nbytes: int, *, hugepages: Literal["auto", "require", "off"] = "auto"
    ) -> None:
        size = _count("nbytes", nbytes, most=2**46)
        code = self._map(size, _choice("hugepages", hugepages, _HUGEPAGES))
        if code:
            hint = "; reserve huge pages: sysctl vm.nr_hugepages" if hugepages == "require" else ""
            raise make_error(code, f"{size} bytes of memory for I/O: {os.strerror(code)}{hint}")
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, super().nbytes)]
        self._closed = False
        with _registry_lock:
            _pools.add(self)
            volumes = list(_volumes)
        for volume in volumes:
            if not volume.closed:
                volume._register_quietly(self)

    def alloc(self, nbytes: int) -> Buffer:
        """Take ``nbytes`` (rounded up to 4096) from the pool, aligned to 4096.

        Raises
        ------
        MemoryError
            No free range is large enough.
        """
        asked = _count("nbytes", nbytes, most=2**46)
        size = -(-asked // self.ALIGNMENT) * self.ALIGNMENT
        if self._closed:
            raise ValueError("this pool is closed")
        with self._lock:
            start = self._take(size)
        if start is None:
            largest = max((n for _, n in self._free), default=0)
            raise MemoryError(f"pool of {self.nbytes} bytes: no room for {size}, the largest free "
                              f"range has {largest}")
        buffer = Buffer.__new__(Buffer)
        buffer._attach(self, start, size)
        buffer._pool = self
        return buffer

    def _take(self, size: int) -> int | None:
        for i, (start, length) in enumerate(self._free):
            begin = start
            if size <= self._SLICE and begin // self._SLICE != (begin + size - 1) // self._SLICE:
                begin = (begin // self._SLICE + 1) * self._SLICE
            if begin + size > start + length:
                continue
            rest = [(start, begin - start), (begin + size, start + length - begin - size)]
            self._free[i : i + 1] = [part for part in rest if part[1]]
            return begin
        return None

    def _give_back(self, start: int, size: int) -> None:
        with self._lock:
            self._free.append((start, size))
            self._free.sort()
            merged = [self._free[0]]
            for begin, length in self._free[1:]:
                last, last_length = merged[-1]
                if last + last_length == begin:
                    merged[-1] = (last, last_length + length)
                else:
                    merged.append((begin, length))
            self._free = merged

    def close(self) -> None:
        """Unregister from all volumes. The memory goes when the last buffer is gone."""
        self._closed = True
        with _registry_lock:
            _pools.discard(self)
            volumes = list(_volumes)
        for volume in volumes:
            if not volume.closed:
                try:
                    volume.unregister(self)
                except ValueError:
                    continue  # the kernel or the table had refused it

    def __enter__(self) -> BufferPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None,
                 tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock") and not self._closed:
            self.close()
