# SPDX-License-Identifier: Apache-2.0
"""The whole `Ring`: registering buffers, files, an eventfd, its own descriptor; and probing."""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvio.uring._constants import Op, SetupFlags
from kvio.uring._events import EventRing
from kvio.uring._liburing import ffi, lib
from kvio.uring._memory import Buffer, iovecs, view
from kvio.uring._prep import HasFileno, descriptor_of
from kvio.uring._types import failure

_PROBE_MAX = 256


def _buffer_remedy(code: int, memory: Sequence[Any]) -> str:
    """What to do about a refused registration of buffers."""
    if code == -errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        need = sum(len(piece) for piece in memory if piece is not None)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
        return (
            f"{need} bytes are to be locked and RLIMIT_MEMLOCK, for all processes of this user "
            f"together, is {limit} (a huge page counts whole): raise it (ulimit -l, LimitMEMLOCK= "
            "of systemd) or do without registered buffers"
        )
    if code == -errno.EFAULT:
        return "a registered buffer is at most 1 GiB of ordinary memory: register it in slices"
    if code == -errno.EBUSY:
        return "buffers are registered already: unregister_buffers() first, or update_buffers()"
    return ""


@dataclass(frozen=True, slots=True)
class Probe:
    """The operations that a kernel knows.

    Attributes
    ----------
    known
        How many operations it has numbers for.
    supported
        The numbers that it carries out.
    """

    known: int
    supported: frozenset[int]

    def supports(self, op: int) -> bool:
        """True when the kernel carries out `op`."""
        return op in self.supported


class Ring(EventRing):
    """An io_uring instance: a queue of submissions and a queue of completions.

    Prepare requests (`prep_*`), `submit` them, take their completions (`wait_cqes`,
    `peek_cqes`). A context manager, which closes the ring at its end.

    Buffers given to a `prep_*` method are kept alive, and cannot be resized, until the request's
    completion has been taken. Any thread may use a ring, one prepares and submits and one waits
    at a time; `SINGLE_ISSUER`, `DEFER_TASKRUN` and `register_ring_fd` tie it to one thread. A
    process that forked off is refused: it must open its own.

    Parameters
    ----------
    entries
        Room in the submission queue; rounded up to a power of two.
    flags
        `SetupFlags`, exactly these: nothing is added and nothing dropped when the kernel refuses.
    cq_entries
        Room in the completion queue; twice `entries` unless given.
    sq_thread_cpu, sq_thread_idle_ms
        For `SQPOLL`: where the polling thread runs, and when it goes to sleep.
    attach_wq
        A ring whose kernel workers this one shares.

    Raises
    ------
    OSError
        The kernel refuses; `capabilities` finds out why, and which flags it would grant.

    Examples
    --------
    >>> with Ring(8) as ring, open("/dev/zero", "rb") as file:
    ...     _ = ring.prep_read(file, bytearray(4096), 0, user_data="page")
    ...     _ = ring.submit_and_wait(1)
    ...     ring.wait_cqe().res
    4096
    """

    def enable(self) -> None:
        """Start a ring that was made with `R_DISABLED`."""
        rc = lib.io_uring_enable_rings(self._use())
        if rc < 0:
            raise failure(rc, "io_uring_enable_rings")
        self._flags &= ~SetupFlags.R_DISABLED

    def probe(self) -> Probe:
        """Ask the kernel which operations it carries out."""
        supported = ffi.new("uint8_t[]", _PROBE_MAX)
        rc = lib.kvio_uring_probe(self._use(), supported, _PROBE_MAX)
        if rc < 0:
            raise failure(rc, "io_uring_register(PROBE)")
        flags = ffi.unpack(supported, _PROBE_MAX)
        return Probe(rc, frozenset(op for op, yes in enumerate(flags) if yes))

    def register(self, opcode: int, arg: Buffer | int = 0, count: int = 0) -> int:
        """`io_uring_register` as it is, for what liburing 2.3 does not know.

        Parameters
        ----------
        opcode
            `RegisterOp` or a number.
        arg
            The argument's bytes (a writable buffer where the kernel answers in it) or an address.
        count
            `nr_args`.

        Returns
        -------
        int
            What the call returned, which is never negative.
        """
        pointer = ffi.cast("void *", arg) if isinstance(arg, int) else view(arg)
        rc = lib.kvio_uring_register(self._use(), int(opcode), pointer, count)
        if rc < 0:
            raise failure(rc, f"io_uring_register({opcode!r})")
        return int(rc)

    # --- buffers ---

    @property
    def registered_buffers(self) -> int:
        """Slots in the table of registered buffers."""
        return len(self._registered_buffers)

    def register_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Pin writable buffers for `prep_read_fixed` and its like, by their place in `buffers`.

        They are kept alive until unregistered or until the ring is closed.

        Raises
        ------
        OSError
            ENOMEM: more than RLIMIT_MEMLOCK lets this user lock. EFAULT: one of more than 1 GiB.
            EBUSY: there are buffers already.
        """
        memory = [view(buffer, writable=True) for buffer in buffers]
        with self._sq_lock:
            rc = lib.io_uring_register_buffers(self._use(), iovecs(memory), len(memory))
            if rc < 0:
                what = f"registering {len(memory)} buffers"
                raise failure(rc, what, _buffer_remedy(rc, memory))
            self._registered_buffers = memory

    def register_buffers_sparse(self, count: int) -> None:
        """Make a table of `count` empty slots, to be filled by `update_buffers`."""
        with self._sq_lock:
            rc = lib.io_uring_register_buffers_sparse(self._use(), count)
            if rc < 0:
                raise failure(rc, f"registering {count} empty buffer slots", _buffer_remedy(rc, []))
            self._registered_buffers = [None] * count

    def update_buffers(self, start: int, buffers: Sequence[Buffer | None]) -> None:
        """Put buffers into the slots from `start` on; None empties one.

        Requests under way keep what they began with.
        """
        memory = [None if buffer is None else view(buffer, writable=True) for buffer in buffers]
        empty = ffi.new("char[]", 1)
        vectors = iovecs([empty if piece is None else piece for piece in memory])
        for index, piece in enumerate(memory):
            if piece is None:
                vectors[index].iov_base, vectors[index].iov_len = ffi.NULL, 0
        with self._sq_lock:
            ring = self._use()
            rc = lib.io_uring_register_buffers_update_tag(
                ring, start, vectors, ffi.NULL, len(memory)
            )
            done = max(0, int(rc))
            # on an error part way the kernel reports the slots before it as done
            self._registered_buffers[start : start + done] = memory[:done]
        if done < len(memory):
            what = f"updating buffer slots {start + done} to {start + len(memory) - 1}"
            code = int(rc) if rc < 0 else -errno.EFAULT
            raise failure(code, what, _buffer_remedy(code, memory))

    def unregister_buffers(self) -> None:
        """Give the whole table of buffers back."""
        with self._sq_lock:
            rc = lib.io_uring_unregister_buffers(self._use())
            if rc < 0:
                raise failure(rc, "unregistering buffers")
            self._registered_buffers = []

    def clone_buffers(self, source: Ring) -> None:
        """Take over the registered buffers of another ring without pinning again (Linux 6.12).

        Raises
        ------
        OSError
            EINVAL: an older kernel. EBUSY: this ring has buffers. ENXIO: the other has none.
        """
        with self._sq_lock:
            rc = lib.kvio_uring_clone_buffers(self._use(), source._use())
            if rc < 0:
                raise failure(rc, "cloning registered buffers", _buffer_remedy(rc, []))
            self._registered_buffers = list(source._registered_buffers)

    # --- files ---

    def register_files(self, files: Sequence[int | HasFileno]) -> None:
        """Register descriptors for `SqeFlags.FIXED_FILE`; -1 leaves a slot empty."""
        numbers = ffi.new("int[]", [descriptor_of(file) for file in files])
        self._register("io_uring_register_files", numbers, len(files))

    def register_files_sparse(self, count: int) -> None:
        """Make a table of `count` empty slots."""
        self._register("io_uring_register_files_sparse", count)

    def update_files(self, start: int, files: Sequence[int | HasFileno]) -> int:
        """Replace the files from slot `start` on; returns how many were."""
        numbers = ffi.new("int[]", [descriptor_of(file) for file in files])
        return self._register("io_uring_register_files_update", start, numbers, len(files))

    def unregister_files(self) -> None:
        """Give the whole table of files back."""
        self._register("io_uring_unregister_files")

    # --- the rest ---

    def register_eventfd(self, fd: int | HasFileno, *, async_only: bool = False) -> None:
        """Have completions signalled through an eventfd.

        On a `DEFER_TASKRUN` ring it fires before they are in the queue; `peek_cqes` gets them.
        """
        name = "io_uring_register_eventfd_async" if async_only else "io_uring_register_eventfd"
        self._register(name, descriptor_of(fd))

    def unregister_eventfd(self) -> None:
        """Stop signalling."""
        self._register("io_uring_unregister_eventfd")

    def register_ring_fd(self) -> None:
        """Save the look-up of the ring's descriptor in each system call (Linux 5.18).

        From then on only the calling thread may use this ring.
        """
        self._register("io_uring_register_ring_fd")
        self._ring_fd_thread = threading.get_ident()

    def unregister_ring_fd(self) -> None:
        """Undo `register_ring_fd`."""
        self._register("io_uring_unregister_ring_fd")
        self._ring_fd_thread = None

    def register_iowq_max_workers(self, *, bounded: int = 0, unbounded: int = 0) -> tuple[int, int]:
        """Limit the kernel's worker threads of this process; 0 leaves a limit as it is.

        Returns
        -------
        tuple of int
            The limits until now: for files and block devices, for everything else.
        """
        limits = ffi.new("unsigned int[2]", [bounded, unbounded])
        self._register("io_uring_register_iowq_max_workers", limits)
        return int(limits[0]), int(limits[1])

    def _register(self, name: str, *args: Any) -> int:
        with self._sq_lock:
            rc = getattr(lib, name)(self._use(), *args)
        if rc < 0:
            raise failure(rc, name)
        return int(rc)


def probe() -> Probe:
    """The operations that the running kernel carries out; see `Ring.probe`."""
    with Ring(2) as ring:
        return ring.probe()


def op_name(number: int) -> str:
    """The name of an operation, or its number as text when this version does not name it."""
    try:
        return Op(number).name
    except ValueError:
        return str(number)
