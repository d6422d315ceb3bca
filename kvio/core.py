"""The striped volume and memory for I/O: what ``import kvio`` gives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

from kvio import _core
from kvio._checks import choice, count, optional_count
from kvio.batch import Batch
from kvio.files import create_members
from kvio.members import Member, describe
from kvio.pool import Buffer, BufferPool, join
from kvio.stats import Histogram, MemberStats, OpStats, VolumeStats

__all__ = ["Batch", "Buffer", "BufferPool", "Member", "Volume"]

_DIRECT = {True: 0, "prefer": 1, False: 2}
_ENGINES = {"auto": 0, "io_uring": 1, "threads": 2, "io_uring_cmd": 3}
_UNALIGNED = {"bounce": 0, "refuse": 1}


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
    _size: int
    _stripe_unit: int
    _alignment: int
    _mode: str
    _members: tuple[Member, ...]
    _registered: dict[int, memoryview]

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
            stripe_unit=count("stripe_unit", stripe_unit, most=2**63),
            write=mode == "rw",
            direct=choice("direct", direct, _DIRECT),
            engine=choice("engine", engine, _ENGINES),
            queue_depth=count("queue_depth", queue_depth, most=4096),
            max_inflight=optional_count("max_inflight", max_inflight, most=4096),
            max_inflight_bytes=optional_count("max_inflight_bytes", max_inflight_bytes, most=2**63),
            submit_batch=optional_count("submit_batch", submit_batch, most=4096),
            deadline=deadline,
            allow_destroy=bool(allow_destroy),
            unaligned=choice("unaligned", unaligned, _UNALIGNED),
            workers=optional_count("workers", workers, most=256),
            io_threads=count("io_threads", io_threads, most=1024),
            iopoll=bool(iopoll),
            sqpoll=bool(sqpoll),
        )
        try:
            self._describe(mode)
        except BaseException:
            self.close()  # the members are open and claimed already
            raise
        return self

    def _describe(self, mode: str) -> None:
        info = self._info()
        self._size = info["size_bytes"]
        self._stripe_unit = info["stripe_unit"]
        self._alignment = max(info["write_align"], info["read_align"], info["mem_align"])
        self._mode = mode
        self._registered = {}
        self._members = tuple(Member(**self._member_info(i)) for i in range(info["n_members"]))
        join(self)

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
        return describe(self._info(), self._members)

    def stats(self) -> VolumeStats:
        """Counters and latency histograms since the open, as an immutable value."""
        counters, read, write, members = self._stats()
        return VolumeStats(
            read=_op_stats(read),
            write=_op_stats(write),
            members=tuple(
                MemberStats(
                    path=member.path,
                    read=_op_stats(r),
                    write=_op_stats(w),
                    flushes=c["flushes"],
                    discards=c["discards"],
                    retries=c["retries"],
                    in_flight=c["in_flight"],
                    suspect=c["strikes"] >= 3,
                )
                for member, (r, w, c) in zip(self._members, members, strict=True)
            ),
            **counters,
        )

    def register(self, buffer: Any) -> bool:
        """Register memory with every ring of the volume, so that I/O on it needs no page pinning.

        Parameters
        ----------
        buffer : BufferPool or buffer
            Contiguous writable memory. A buffer stays exported until :meth:`unregister` or until
            the volume is gone.

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
        huge = isinstance(buffer, BufferPool) and buffer.hugepages != "none"
        granted = self._register(address, nbytes, huge) == 0
        if not isinstance(buffer, BufferPool):  # a pool unregisters itself before it goes
            self._registered[address] = memoryview(buffer)
        return granted

    def unregister(self, buffer: Any) -> None:
        """Undo :meth:`register`. Rings of idle threads drop it with their next call."""
        address, _ = _range_of(buffer)
        self._unregister(address)
        view = self._registered.pop(address, None)
        if view is not None:
            view.release()

    def _register_quietly(self, pool: BufferPool) -> None:
        try:
            self.register(pool)
        except OSError:
            # No room in the table, or closed meanwhile: I/O from this pool then goes unregistered,
            # which capabilities and stats (unfixed_ops) show.
            return

    def __enter__(self) -> Volume:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.closed:
            return "<kvio.Volume closed>"
        return (
            f"<kvio.Volume {len(self._members)} members, {self._size} bytes, "
            f"{self.engine}, mode={self._mode!r}>"
        )


def _range_of(buffer: Any) -> tuple[int, int]:
    if isinstance(buffer, BufferPool):
        return buffer.address, buffer.nbytes
    address, nbytes = _core.buffer_range(buffer)
    if nbytes == 0:
        raise ValueError("there is nothing to register in an empty buffer")
    return address, nbytes


def _op_stats(raw: tuple[Any, ...]) -> OpStats:
    ops, nbytes, errors, hist = raw
    return OpStats(ops, nbytes, errors, Histogram(*hist))
