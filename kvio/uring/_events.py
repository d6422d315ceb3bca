# SPDX-License-Identifier: Apache-2.0
"""Preparing what waits, ends or signals other requests: polls, timeouts, cancels, messages."""

from __future__ import annotations

from kvio.uring._constants import POLL_ADD_MULTI, CancelFlags, Op, TimeoutFlags
from kvio.uring._liburing import ffi
from kvio.uring._memory import timespec
from kvio.uring._prep import HasFileno, PreparingRing
from kvio.uring._ring import TOKEN_BASE


class EventRing(PreparingRing):
    """The `prep_*` methods that are about other requests; see `kvio.uring.Ring`."""

    def prep_poll_add(
        self, fd: int | HasFileno, events: int, *, multishot: bool = False, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """Complete when one of `events` (`select.POLL*`) is there; `res` holds which.

        A multishot poll completes again and again, with `CqeFlags.MORE` set until the last.
        """
        length = POLL_ADD_MULTI if multishot else 0
        return self.prep(
            Op.POLL_ADD, fd=fd, length=length, op_flags=events, flags=flags, user_data=user_data
        )

    def prep_poll_remove(self, token: int, *, flags: int = 0, user_data: object = None) -> int:
        """End the poll that `prep_poll_add` returned the token of."""
        return self.prep(Op.POLL_REMOVE, address=token, flags=flags, user_data=user_data)

    def prep_timeout(
        self, seconds: float, *, count: int = 0, timeout_flags: int = 0, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """Complete with -ETIME after `seconds`, or with 0 after `count` other completions."""
        spec = timespec(seconds)
        return self.prep(
            Op.TIMEOUT, address=int(ffi.cast("uintptr_t", spec)), length=1, offset=count,
            op_flags=timeout_flags, flags=flags, user_data=user_data, keep=spec,
        )  # fmt: skip

    def prep_link_timeout(
        self, seconds: float, *, timeout_flags: int = 0, flags: int = 0, user_data: object = None
    ) -> int:
        """Cancel the previous request, which carries `SqeFlags.IO_LINK`, after `seconds`.

        Block I/O that a device has begun is not cancelled by this: it goes on, and completes.
        """
        spec = timespec(seconds)
        return self.prep(
            Op.LINK_TIMEOUT, address=int(ffi.cast("uintptr_t", spec)), length=1,
            op_flags=timeout_flags, flags=flags, user_data=user_data, keep=spec,
        )  # fmt: skip

    def prep_timeout_remove(self, token: int, *, flags: int = 0, user_data: object = None) -> int:
        """Take back the timeout that `prep_timeout` returned the token of."""
        return self.prep(Op.TIMEOUT_REMOVE, address=token, flags=flags, user_data=user_data)

    def prep_timeout_update(
        self, token: int, seconds: float, *, timeout_flags: int = 0, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """Give a running timeout `seconds` from now."""
        spec = timespec(seconds)
        return self.prep(
            Op.TIMEOUT_REMOVE, address=token, offset=int(ffi.cast("uintptr_t", spec)),
            op_flags=timeout_flags | TimeoutFlags.UPDATE, flags=flags, user_data=user_data,
            keep=spec,
        )  # fmt: skip

    def prep_cancel(
        self, token: int, *, cancel_flags: int = 0, flags: int = 0, user_data: object = None
    ) -> int:
        """Cancel a request by its token. `res`: 0 or a count, -ENOENT, -EALREADY (running)."""
        return self.prep(
            Op.ASYNC_CANCEL, address=token, op_flags=cancel_flags, flags=flags, user_data=user_data
        )

    def prep_cancel_fd(
        self, fd: int | HasFileno, *, cancel_flags: int = CancelFlags.ALL, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """Cancel the requests on a file; `res` is how many."""
        return self.prep(
            Op.ASYNC_CANCEL, fd=fd, op_flags=cancel_flags | CancelFlags.FD, flags=flags,
            user_data=user_data,
        )  # fmt: skip

    def prep_msg_ring(
        self, target: int | HasFileno, res: int, data: int, *, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """Post a completion with this `res` and integer `data` (below 2**63) to another ring.

        The target sees it as a `Cqe` whose `user_data` is `data`.
        """
        if not 0 <= data < TOKEN_BASE:
            raise ValueError("data must be an integer below 2**63")
        return self.prep(
            Op.MSG_RING, fd=target, length=res & 0xFFFFFFFF, offset=data, flags=flags,
            user_data=user_data,
        )  # fmt: skip
