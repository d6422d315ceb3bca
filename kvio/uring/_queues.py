# SPDX-License-Identifier: Apache-2.0
"""The two queues of a ring as its user sees them: submit, and take completions."""

from __future__ import annotations

import errno
import time

from kvio.uring._constants import Features
from kvio.uring._liburing import lib
from kvio.uring._ring import RingBase
from kvio.uring._types import REAP_MAX, REMEDIES, Cqe, failure, timeout_ns


class QueueRing(RingBase):
    """Submission and completion; see `kvio.uring.Ring`."""

    # --- submission ---

    def submit(self) -> int:
        """Hand the prepared entries to the kernel.

        Returns
        -------
        int
            How many it took. Without `SUBMIT_ALL` the kernel stops after an invalid one; submit
            again until `sq_ready` is 0.

        Raises
        ------
        OSError
            Nothing was taken; the entries stay queued for another submit, or for `discard`.
        """
        with self._sq_lock:
            ring = self._use()
            rc = -errno.EINTR
            while rc == -errno.EINTR:
                rc = lib.io_uring_submit(ring)
        if rc < 0:
            raise failure(rc, "io_uring_submit", REMEDIES.get(-rc, ""))
        return int(rc)

    def submit_and_wait(self, count: int = 1, *, timeout: float | None = None) -> int:
        """`submit`, then wait until `count` completions are ready, in one system call.

        Returns
        -------
        int
            Entries submitted. After `timeout` seconds, or after a signal, there may be fewer than
            `count` completions: see `cq_ready`, and `wait_cqes`.
        """
        limit_ns = timeout_ns(timeout)
        with self._cq_lock, self._sq_lock:
            ring = self._use()
            self._check_wait(count, limit_ns)
            before = self.sq_ready
            rc = lib.kvio_uring_submit_and_wait(ring, count, limit_ns)
            # a polling kernel thread takes them a little later, but they are out of our hands
            taken = before if self._polled else before - self.sq_ready
        if rc < 0 and rc not in (-errno.ETIME, -errno.EINTR) and not taken:
            raise failure(rc, "io_uring_submit_and_wait", REMEDIES.get(-rc, ""))
        return taken

    def discard(self) -> list[object]:
        """Take back every prepared entry that the kernel has not consumed.

        For a ring whose submit failed, before it is used for something else.

        Returns
        -------
        list
            The `user_data` of what was dropped, in order.
        """
        with self._sq_lock:
            self._use()
            return self._discard()

    # --- completion ---

    def _check_wait(self, count: int, limit_ns: int) -> None:
        if not 0 <= count <= self._cq_entries:
            raise ValueError(f"count must be between 0 and cq_entries {self._cq_entries}")
        if limit_ns >= 0 and not self._ring.features & Features.EXT_ARG:
            raise OSError(errno.EOPNOTSUPP, "waiting with a timeout needs Linux 5.11 or newer")

    def peek_cqes(self, max_count: int = REAP_MAX) -> list[Cqe]:
        """Take up to `max_count` completions that are ready, without waiting."""
        with self._cq_lock:
            self._use()
            taken = batch = self._reap(min(max_count, REAP_MAX))
            while len(batch) == REAP_MAX and len(taken) < max_count:
                batch = self._reap(min(max_count - len(taken), REAP_MAX))
                taken = taken + batch
            return taken

    def peek_cqe(self) -> Cqe | None:
        """Take one completion if one is ready."""
        taken = self.peek_cqes(1)
        return taken[0] if taken else None

    def wait_cqes(self, count: int = 1, *, timeout: float | None = None) -> list[Cqe]:
        """Wait for `count` completions and take all that are ready then.

        The GIL is free meanwhile, and signal handlers run. On an `IOPOLL` ring the kernel spins
        and does not look at `timeout`.

        Raises
        ------
        TimeoutError
            Fewer are ready after `timeout` seconds; those stay in the queue.
        """
        return self._wait(count, timeout, max(count, REAP_MAX))

    def wait_cqe(self, *, timeout: float | None = None) -> Cqe:
        """Wait for one completion and take it; as `wait_cqes`."""
        return self._wait(1, timeout, 1)[0]

    def _wait(self, count: int, timeout: float | None, max_count: int) -> list[Cqe]:
        limit_ns = timeout_ns(timeout)
        deadline_ns = time.monotonic_ns() + limit_ns
        locked = self._cq_lock.acquire(timeout=-1 if timeout is None else timeout)
        try:
            while locked:
                ring = self._use()
                self._check_wait(count, limit_ns)
                left_ns = max(0, deadline_ns - time.monotonic_ns()) if limit_ns >= 0 else -1
                rc = lib.kvio_uring_wait(ring, count, left_ns)
                if lib.io_uring_cq_ready(ring) >= count:
                    return self.peek_cqes(max_count)
                if rc < 0 and rc not in (-errno.EINTR, -errno.ETIME):
                    raise failure(rc, "io_uring_wait_cqes", REMEDIES.get(-rc, ""))
                # the kernel gives 0, not -ETIME, when some but too few are there
                if limit_ns >= 0 and time.monotonic_ns() >= deadline_ns:
                    break
        finally:
            if locked:
                self._cq_lock.release()
        raise TimeoutError(
            errno.ETIMEDOUT, f"{count} completions were not ready within {timeout} seconds"
        )
