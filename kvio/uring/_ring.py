# SPDX-License-Identifier: Apache-2.0
"""One ring: set-up, submission, completion, closing.

Invariants
  R1  What a request points at (buffers, paths, iovecs) is referenced from `_requests` from the
      moment it is prepared until its last completion has been taken, or for ever when the ring
      is closed and the kernel will not give it back.
  R2  An entry's user_data in the ring is a token with the top bit set, drawn once and never
      again, so a completion cannot be credited to another request. Whatever has that bit clear
      was put there by the caller (`MSG_RING`, `CQE_SKIP_SUCCESS`) and is handed on as it is.
  R3  The submission side is touched only under `_sq_lock`, the completion side only under
      `_cq_lock`: cffi calls run without the GIL.
  R4  A process that forked off never touches the ring: it shares its memory with the parent.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
import time
import warnings
from types import TracebackType
from typing import Any, Self

from kvio.uring._constants import CqeFlags, Features, SetupFlags
from kvio.uring._liburing import ffi, lib
from kvio.uring._types import (
    REAP_MAX,
    REMEDIES,
    Cqe,
    CqeArrays,
    Request,
    failure,
    version,
)

TOKEN_BASE = 1 << 63
_MORE = int(CqeFlags.MORE)  # a plain integer: IntFlag's & would cost more than the rest of a reap
_DRAIN_POLL_S = 0.001
_GC_CLOSE_TIMEOUT_S = 5.0
_UNSUPPORTED = (
    SetupFlags.NO_MMAP
    | SetupFlags.REGISTERED_FD_ONLY
    | SetupFlags.NO_SQARRAY
    | SetupFlags.CQE_MIXED
    | SetupFlags.SQE_MIXED
)

# What rings closed with requests in the kernel left behind: it may be written to at any time.
_abandoned: list[object] = []


class RingBase:
    """Life cycle, submission and completion of a ring; see `kvio.uring.Ring`."""

    def __init__(
        self,
        entries: int,
        *,
        flags: int = 0,
        cq_entries: int | None = None,
        sq_thread_cpu: int | None = None,
        sq_thread_idle_ms: int | None = None,
        attach_wq: RingBase | None = None,
    ) -> None:
        self._closed = True
        if not isinstance(entries, int) or not 0 < entries < 1 << 32:
            raise ValueError(f"entries must be a positive number of submissions, not {entries!r}")
        wanted = SetupFlags(flags)
        if wanted & _UNSUPPORTED:
            raise ValueError(f"liburing {version()} cannot drive {wanted & _UNSUPPORTED!r}")
        params = ffi.new("struct io_uring_params *")
        if cq_entries is not None:
            wanted |= SetupFlags.CQSIZE
            params.cq_entries = cq_entries
        if sq_thread_cpu is not None:
            wanted |= SetupFlags.SQ_AFF
            params.sq_thread_cpu = sq_thread_cpu
        if sq_thread_idle_ms is not None:
            params.sq_thread_idle = sq_thread_idle_ms
        if attach_wq is not None:
            wanted |= SetupFlags.ATTACH_WQ
            params.wq_fd = attach_wq.fileno()
        params.flags = int(wanted)
        ring = ffi.new("struct io_uring *")
        rc = lib.io_uring_queue_init_params(entries, ring, params)
        if rc < 0:
            what = f"io_uring_setup({entries} entries, flags {wanted!r})"
            raise failure(rc, what, "kvio.uring.capabilities() says which flags this kernel grants")
        # a child gets no mapping at all rather than one that it could corrupt the parent with
        lib.io_uring_ring_dontfork(ring)
        self._ring: Any = ring
        self._flags = wanted
        self._cq_entries = int(params.cq_entries)
        self._wide = bool(wanted & SetupFlags.CQE32)
        self._polled = bool(wanted & SetupFlags.SQPOLL)
        self._pid = os.getpid()
        self._sq_lock = threading.RLock()
        self._cq_lock = threading.RLock()
        self._requests: dict[int, Request] = {}
        self._tokens = itertools.count(TOKEN_BASE)
        self._arrays: list[CqeArrays] = []
        self._registered_buffers: list[Any] = []
        self._ring_fd_thread: int | None = None
        self._closed = False

    # --- life cycle ---

    def _use(self) -> Any:
        """The ring for one call, if it may be used here and now."""
        if self._closed:
            raise OSError(errno.EBADF, "this Ring is closed: open a new one")
        if self._pid != os.getpid():
            raise OSError(
                errno.EBADF,
                f"this Ring was opened by process {self._pid} and cannot be used in its fork "
                f"{os.getpid()}: open a new Ring after the fork",
            )
        if self._ring_fd_thread is not None and self._ring_fd_thread != threading.get_ident():
            raise OSError(
                errno.EINVAL,
                "register_ring_fd() ties this Ring to the thread that called it, and this is "
                "another one: use it from that thread, or call unregister_ring_fd() there",
            )
        return self._ring

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self, *, timeout: float = 30.0) -> None:
        """Cancel what can be cancelled, wait for the rest, and give the ring back.

        Entries that were prepared but not submitted are dropped. Completions not taken are lost,
        and whether a cancelled request had an effect is unknown: wait for what matters first.
        In a process that forked off, this only forgets the ring.

        Parameters
        ----------
        timeout
            Seconds to wait for requests that the kernel holds.

        Raises
        ------
        TimeoutError
            Requests are still in the kernel. The ring is closed, and their buffers stay
            allocated as long as the process lives, since they may yet be written to.
        OSError
            EBUSY: another thread is waiting on this ring; it stays open.
        """
        if self._closed:
            return
        if self._pid != os.getpid():
            self._closed = True
            return
        if not self._cq_lock.acquire(blocking=False):
            raise OSError(errno.EBUSY, "another thread is waiting on this Ring: close it later")
        with self._sq_lock:
            try:
                self._discard()
                reason = self._drain(time.monotonic() + timeout)
                self._closed = True
                if self._ring_fd_thread not in (None, threading.get_ident()):
                    lib.kvio_uring_forget_registered_fd(self._ring)
                lib.io_uring_queue_exit(self._ring)
            finally:
                self._cq_lock.release()
        left = len(self._requests)
        if left:
            _abandoned.append((self._requests, self._registered_buffers))
        self._requests, self._registered_buffers = {}, []
        if left:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"Ring closed with {left} requests still in the kernel ({reason}); "
                "their buffers are kept until the process ends",
            )

    def _drain(self, deadline: float) -> str:
        """Waits until no request is left; returns why it gave up, if it did."""
        if self._requests:
            lib.kvio_uring_cancel_all(self._ring)
        timed = bool(self._ring.features & Features.EXT_ARG)
        while self._requests:
            try:
                if self._reap(REAP_MAX):
                    continue
            except OSError as error:
                return str(error)
            left = deadline - time.monotonic()
            if left <= 0:
                return "they did not finish in time"
            if not timed:
                time.sleep(_DRAIN_POLL_S)
                continue
            rc = lib.kvio_uring_wait(self._ring, 1, int(left * 1e9))
            if rc < 0 and rc not in (-errno.ETIME, -errno.EINTR, -errno.EAGAIN):
                return os.strerror(-rc)
        return ""

    def __enter__(self) -> Self:
        self._use()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # at the end of the process the kernel cleans up, and the modules used here may be gone
        if self._closed or sys.is_finalizing() or self._pid != os.getpid():
            return
        warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
        try:
            self.close(timeout=_GC_CLOSE_TIMEOUT_S)
        except OSError as error:
            warnings.warn(str(error), ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"fd {self._ring.ring_fd}, {self.in_flight} in flight"
        return f"<kvio.uring.Ring {state}>"

    def fileno(self) -> int:
        """The ring's file descriptor, for poll(2) and for other rings."""
        return int(self._use().ring_fd)

    # --- what it is ---

    @property
    def flags(self) -> SetupFlags:
        """The set-up flags it was made with."""
        return SetupFlags(self._use().flags)

    @property
    def features(self) -> Features:
        """What the kernel says it can do."""
        return Features(self._use().features)

    @property
    def sq_entries(self) -> int:
        """Room in the submission queue: entries between two submits."""
        return int(self._use().sq.ring_entries)

    @property
    def cq_entries(self) -> int:
        """Room in the completion queue."""
        self._use()
        return self._cq_entries

    @property
    def sq_ready(self) -> int:
        """Entries prepared and not yet taken by the kernel."""
        return int(lib.io_uring_sq_ready(self._use()))

    @property
    def sq_space_left(self) -> int:
        """Entries that can be prepared before the next submit."""
        return int(lib.io_uring_sq_space_left(self._use()))

    @property
    def cq_ready(self) -> int:
        """Completions that can be taken without entering the kernel."""
        return int(lib.io_uring_cq_ready(self._use()))

    @property
    def cq_overflow(self) -> bool:
        """True while the kernel keeps completions aside because the queue is full."""
        return bool(lib.io_uring_cq_has_overflow(self._use()))

    @property
    def in_flight(self) -> int:
        """Requests prepared whose last completion has not been taken."""
        return len(self._requests)

    # --- what closing and the queues share ---

    def _discard(self) -> list[object]:
        room = int(self._ring.sq.ring_entries)
        tokens = ffi.new("uint64_t[]", room)
        count = lib.kvio_uring_discard(self._ring, tokens, room)
        dropped = []
        for token in ffi.unpack(tokens, count):
            request = self._requests.pop(token, None)
            dropped.append(request.user_data if request else token)
        return dropped

    def _reap(self, max_count: int) -> list[Cqe]:
        """One batch. Under `_cq_lock`; a signal handler that comes back here gets other arrays."""
        wide = self._wide
        arrays = self._arrays.pop() if self._arrays else CqeArrays(wide)
        rc = lib.kvio_uring_reap(
            self._ring, arrays.user_data, arrays.res, arrays.flags, arrays.big, max_count
        )
        if rc < 0:
            raise failure(rc, "taking completions", REMEDIES.get(-rc, ""))
        taken = []
        if rc:
            tokens, results = ffi.unpack(arrays.user_data, rc), ffi.unpack(arrays.res, rc)
            for index, flags in enumerate(ffi.unpack(arrays.flags, rc)):
                token = tokens[index]
                request = self._requests.get(token)
                if request is not None and not flags & _MORE:
                    del self._requests[token]
                big = (arrays.big[2 * index], arrays.big[2 * index + 1]) if wide else None
                user_data = request.user_data if request else token
                taken.append(Cqe(user_data, results[index], flags, token, big))
        self._arrays.append(arrays)
        return taken
