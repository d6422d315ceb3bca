# SPDX-License-Identifier: Apache-2.0
"""Preparing submissions: one method an operation, each filling one entry of the queue."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvio.uring._constants import (
    AT_FDCWD,
    FSYNC_DATASYNC,
    OFFSET_CURRENT,
    URING_CMD_FIXED,
    Op,
    SqeFlags,
)
from kvio.uring._liburing import ffi, lib
from kvio.uring._memory import (
    STATX_BASIC,
    STATX_DIOALIGN,
    STATX_SIZE,
    Buffer,
    iovecs,
    view,
)
from kvio.uring._queues import QueueRing
from kvio.uring._ring import TOKEN_BASE
from kvio.uring._types import Request, failure

_SKIP_SUCCESS = int(SqeFlags.CQE_SKIP_SUCCESS)  # IntFlag's own & costs a microsecond
_MAX_LENGTH = (1 << 32) - 1


class HasFileno(Protocol):
    """A file, a socket, a Ring: what `fileno()` can be asked of."""

    def fileno(self) -> int: ...


def descriptor_of(file: int | HasFileno) -> int:
    return file if isinstance(file, int) else file.fileno()


class PreparingRing(QueueRing):
    """The `prep_*` methods; see `kvio.uring.Ring`."""

    def prep(
        self,
        op: int,
        *,
        fd: int | HasFileno = -1,
        address: int = 0,
        length: int = 0,
        offset: int = 0,
        op_flags: int = 0,
        ioprio: int = 0,
        buf_index: int = 0,
        file_index: int = 0,
        address3: int = 0,
        flags: int = 0,
        user_data: object = None,
        keep: object = None,
    ) -> int:
        """Prepare any operation by its number and the raw fields of its entry.

        The other methods all end here, and operations that they leave out can be had this way.

        Parameters
        ----------
        op
            `Op` or a number that this version does not name.
        offset, op_flags, address3, ...
            Fields of `struct io_uring_sqe`; op_flags is the union of `rw_flags` and its like.
        flags
            `SqeFlags`. `FIXED_FILE` makes `fd` an index into the registered files.
        user_data
            Comes back in the completion. With `CQE_SKIP_SUCCESS` it must be a small integer.
        keep
            Referenced until the completion has been taken: whatever the addresses point into.

        Returns
        -------
        int
            A token that names this request in `prep_cancel` and its like.

        Raises
        ------
        BlockingIOError
            The submission queue is full.
        """
        with self._sq_lock:
            ring = self._use()
            token = self._admit(flags, user_data, keep)
            rc = lib.kvio_uring_prep(
                ring, op, flags, descriptor_of(fd), address, length, offset & OFFSET_CURRENT,
                op_flags, token, ioprio, buf_index, file_index, address3,
            )  # fmt: skip
            self._prepared(rc, token, user_data, keep)
        return token

    def _admit(self, flags: int, user_data: object, keep: object) -> int:
        """The user_data that goes into the entry: a token, or the caller's own integer."""
        if not int(flags) & _SKIP_SUCCESS:
            return next(self._tokens)
        if keep is not None:
            raise ValueError(
                "CQE_SKIP_SUCCESS leaves no completion after which memory could be given back: "
                "use it only for operations without a buffer, path or timeout"
            )
        number = 0 if user_data is None else user_data
        if not isinstance(number, int) or not 0 <= number < TOKEN_BASE:
            raise ValueError("with CQE_SKIP_SUCCESS user_data must be an integer below 2**63")
        return number

    def _prepared(self, rc: int, token: int, user_data: object, keep: object) -> None:
        if rc < 0:
            what = f"the submission queue of {self.sq_entries} entries"
            raise failure(rc, what, "it is full: call submit() first")
        if token >= TOKEN_BASE:
            self._requests[token] = Request(user_data, keep)

    def _prep_rw(
        self, op: Op, file: int | HasFileno, buffer: Buffer, offset: int, reads: bool, **rest: Any
    ) -> int:
        memory = view(buffer, writable=reads)
        if len(memory) > _MAX_LENGTH:
            raise ValueError(f"one request moves less than 4 GiB, not {len(memory)}: split it")
        address = int(ffi.cast("uintptr_t", memory))
        return self.prep(
            op, fd=file, address=address, length=len(memory), offset=offset, keep=memory, **rest
        )

    def _prep_vec(
        self,
        op: Op,
        file: int | HasFileno,
        buffers: Sequence[Buffer],
        offset: int,
        reads: bool,
        **rest: Any,
    ) -> int:
        memory = [view(buffer, writable=reads) for buffer in buffers]
        vectors = iovecs(memory)
        address = int(ffi.cast("uintptr_t", vectors))
        return self.prep(
            op, fd=file, address=address, length=len(memory), offset=offset,
            keep=(vectors, memory), **rest,
        )  # fmt: skip

    # --- data ---

    def prep_read(
        self, fd: int | HasFileno, buffer: Buffer, offset: int, *, rw_flags: int = 0,
        flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Read into a writable buffer; its length is the number of bytes asked for.

        An offset of -1 uses, and moves, the file's own position. `rw_flags` are `os.RWF_*`.
        """
        return self._prep_rw(
            Op.READ, fd, buffer, offset, True, op_flags=rw_flags, flags=flags, user_data=user_data
        )

    def prep_write(
        self, fd: int | HasFileno, buffer: Buffer, offset: int, *, rw_flags: int = 0,
        flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Write a buffer."""
        return self._prep_rw(
            Op.WRITE, fd, buffer, offset, False, op_flags=rw_flags, flags=flags, user_data=user_data
        )

    def prep_readv(
        self, fd: int | HasFileno, buffers: Sequence[Buffer], offset: int, *, rw_flags: int = 0,
        flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Read into several writable buffers, one after the other; at most 1024."""
        return self._prep_vec(
            Op.READV, fd, buffers, offset, True, op_flags=rw_flags, flags=flags, user_data=user_data
        )

    def prep_writev(
        self, fd: int | HasFileno, buffers: Sequence[Buffer], offset: int, *, rw_flags: int = 0,
        flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Write several buffers, one after the other; at most 1024."""
        return self._prep_vec(
            Op.WRITEV, fd, buffers, offset, False, op_flags=rw_flags, flags=flags,
            user_data=user_data,
        )  # fmt: skip

    def prep_read_fixed(
        self, fd: int | HasFileno, buffer: Buffer, offset: int, *, buf_index: int,
        rw_flags: int = 0, flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Read into (a slice of) the registered buffer `buf_index`; EFAULT outside of it."""
        return self._prep_rw(
            Op.READ_FIXED, fd, buffer, offset, True, buf_index=buf_index, op_flags=rw_flags,
            flags=flags, user_data=user_data,
        )  # fmt: skip

    def prep_write_fixed(
        self, fd: int | HasFileno, buffer: Buffer, offset: int, *, buf_index: int,
        rw_flags: int = 0, flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Write (a slice of) the registered buffer `buf_index`; EFAULT outside of it."""
        return self._prep_rw(
            Op.WRITE_FIXED, fd, buffer, offset, False, buf_index=buf_index, op_flags=rw_flags,
            flags=flags, user_data=user_data,
        )  # fmt: skip

    def prep_readv_fixed(
        self, fd: int | HasFileno, buffers: Sequence[Buffer], offset: int, *, buf_index: int,
        rw_flags: int = 0, flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Read into several slices of one registered buffer (Linux 6.15)."""
        return self._prep_vec(
            Op.READV_FIXED, fd, buffers, offset, True, buf_index=buf_index, op_flags=rw_flags,
            flags=flags, user_data=user_data,
        )  # fmt: skip

    def prep_writev_fixed(
        self, fd: int | HasFileno, buffers: Sequence[Buffer], offset: int, *, buf_index: int,
        rw_flags: int = 0, flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """Write several slices of one registered buffer (Linux 6.15)."""
        return self._prep_vec(
            Op.WRITEV_FIXED, fd, buffers, offset, False, buf_index=buf_index, op_flags=rw_flags,
            flags=flags, user_data=user_data,
        )  # fmt: skip

    # --- files ---

    def prep_nop(self, *, flags: int = 0, user_data: object = None) -> int:
        """Do nothing, and complete."""
        return self.prep(Op.NOP, flags=flags, user_data=user_data)

    def prep_fsync(
        self, fd: int | HasFileno, *, datasync: bool = False, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """fsync, or fdatasync. EINVAL on an `IOPOLL` ring."""
        op_flags = FSYNC_DATASYNC if datasync else 0
        return self.prep(Op.FSYNC, fd=fd, op_flags=op_flags, flags=flags, user_data=user_data)

    def prep_fallocate(
        self, fd: int | HasFileno, mode: int, offset: int, length: int, *, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """fallocate(2); `mode` is `FALLOC_FL_*`."""
        return self.prep(
            Op.FALLOCATE, fd=fd, length=mode, offset=offset, address=length, flags=flags,
            user_data=user_data,
        )  # fmt: skip

    def prep_openat(
        self, path: str | bytes | os.PathLike[str], open_flags: int, *, mode: int = 0o600,
        dir_fd: int = AT_FDCWD, flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """openat(2); the completion's `res` is the descriptor, which the caller closes."""
        name = ffi.new("char[]", os.fsencode(path))
        return self.prep(
            Op.OPENAT, fd=dir_fd, address=int(ffi.cast("uintptr_t", name)), length=mode,
            op_flags=open_flags, flags=flags, user_data=user_data, keep=name,
        )  # fmt: skip

    def prep_close(
        self, fd: int = 0, *, file_index: int | None = None, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """Close a descriptor, or empty slot `file_index` of the registered files."""
        slot = 0 if file_index is None else file_index + 1
        return self.prep(Op.CLOSE, fd=fd, file_index=slot, flags=flags, user_data=user_data)

    def prep_statx(
        self, path: str | bytes | os.PathLike[str], result: Buffer, *, dir_fd: int = AT_FDCWD,
        at_flags: int = 0, mask: int = STATX_BASIC | STATX_DIOALIGN, flags: int = 0,
        user_data: object = None,
    ) -> int:  # fmt: skip
        """statx(2) into a writable buffer of 256 bytes, for `StatxResult.parse`."""
        memory = view(result, writable=True)
        if len(memory) < STATX_SIZE:
            raise ValueError(f"statx writes {STATX_SIZE} bytes, and the buffer has {len(memory)}")
        name = ffi.new("char[]", os.fsencode(path))
        return self.prep(
            Op.STATX, fd=dir_fd, address=int(ffi.cast("uintptr_t", name)), length=mask,
            offset=int(ffi.cast("uintptr_t", memory)), op_flags=at_flags, flags=flags,
            user_data=user_data, keep=(name, memory),
        )  # fmt: skip

    def prep_uring_cmd(
        self, fd: int | HasFileno, cmd_op: int, cmd: Buffer, *, buf_index: int | None = None,
        buffers: Iterable[Buffer] = (), flags: int = 0, user_data: object = None,
    ) -> int:  # fmt: skip
        """A command that the file's driver defines, such as an NVMe passthrough.

        Parameters
        ----------
        cmd_op
            The driver's number, for example `NVME_URING_CMD_IO`.
        cmd
            Up to 16 bytes of command, 80 on a ring made with `SQE128`.
        buf_index
            The registered buffer that the addresses within `cmd` lie in.
        buffers
            What the addresses within `cmd` point to; kept until the completion.
        """
        memory = view(cmd)
        keep = [view(buffer) for buffer in buffers]
        with self._sq_lock:
            ring = self._use()
            token = self._admit(flags, user_data, keep or None)
            rc = lib.kvio_uring_prep_cmd(
                ring, flags, descriptor_of(fd), cmd_op, memory, len(memory),
                0 if buf_index is None else URING_CMD_FIXED, token, buf_index or 0,
            )  # fmt: skip
            if rc == -errno.EMSGSIZE:
                raise ValueError(f"a command of {len(memory)} bytes does not fit: see SQE128")
            self._prepared(rc, token, user_data, keep)
        return token
