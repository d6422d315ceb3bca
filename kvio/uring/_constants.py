# SPDX-License-Identifier: Apache-2.0
"""Numbers of the io_uring interface, from the kernel's `include/uapi/linux/io_uring.h`.

They are written out here rather than taken from the header of the liburing that kvio was built
with: the running kernel is often newer than that, and the numbers never change.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class SetupFlags(IntFlag):
    """`io_uring_setup` flags. Those that liburing 2.3 cannot drive are not accepted by `Ring`."""

    IOPOLL = 1 << 0
    SQPOLL = 1 << 1
    SQ_AFF = 1 << 2
    CQSIZE = 1 << 3
    CLAMP = 1 << 4
    ATTACH_WQ = 1 << 5
    R_DISABLED = 1 << 6
    SUBMIT_ALL = 1 << 7
    COOP_TASKRUN = 1 << 8
    TASKRUN_FLAG = 1 << 9
    SQE128 = 1 << 10
    CQE32 = 1 << 11
    SINGLE_ISSUER = 1 << 12
    DEFER_TASKRUN = 1 << 13
    NO_MMAP = 1 << 14
    REGISTERED_FD_ONLY = 1 << 15
    NO_SQARRAY = 1 << 16
    HYBRID_IOPOLL = 1 << 17
    CQE_MIXED = 1 << 18
    SQE_MIXED = 1 << 19


class Features(IntFlag):
    """`IORING_FEAT_*`: what the kernel said of itself when the ring was set up."""

    SINGLE_MMAP = 1 << 0
    NODROP = 1 << 1
    SUBMIT_STABLE = 1 << 2
    RW_CUR_POS = 1 << 3
    CUR_PERSONALITY = 1 << 4
    FAST_POLL = 1 << 5
    POLL_32BITS = 1 << 6
    SQPOLL_NONFIXED = 1 << 7
    EXT_ARG = 1 << 8
    NATIVE_WORKERS = 1 << 9
    RSRC_TAGS = 1 << 10
    CQE_SKIP = 1 << 11
    LINKED_FILE = 1 << 12
    REG_REG_RING = 1 << 13
    RECVSEND_BUNDLE = 1 << 14
    MIN_TIMEOUT = 1 << 15
    RW_ATTR = 1 << 16
    NO_IOWAIT = 1 << 17


class SqeFlags(IntFlag):
    """`IOSQE_*`: flags of one submission."""

    FIXED_FILE = 1 << 0
    IO_DRAIN = 1 << 1
    IO_LINK = 1 << 2
    IO_HARDLINK = 1 << 3
    ASYNC = 1 << 4
    BUFFER_SELECT = 1 << 5
    CQE_SKIP_SUCCESS = 1 << 6


class CqeFlags(IntFlag):
    """`IORING_CQE_F_*`: flags of one completion."""

    BUFFER = 1 << 0
    MORE = 1 << 1
    SOCK_NONEMPTY = 1 << 2
    NOTIF = 1 << 3
    BUF_MORE = 1 << 4
    SKIP = 1 << 5
    CQE_32 = 1 << 15


class TimeoutFlags(IntFlag):
    """`IORING_TIMEOUT_*`."""

    ABS = 1 << 0
    UPDATE = 1 << 1
    BOOTTIME = 1 << 2
    REALTIME = 1 << 3
    LINK_TIMEOUT_UPDATE = 1 << 4
    ETIME_SUCCESS = 1 << 5
    MULTISHOT = 1 << 6


class CancelFlags(IntFlag):
    """`IORING_ASYNC_CANCEL_*`."""

    ALL = 1 << 0
    FD = 1 << 1
    ANY = 1 << 2
    FD_FIXED = 1 << 3
    USERDATA = 1 << 4
    OP = 1 << 5


class RegisterOp(IntEnum):
    """`io_uring_register` operations, those of newer kernels included."""

    REGISTER_BUFFERS = 0
    UNREGISTER_BUFFERS = 1
    REGISTER_FILES = 2
    UNREGISTER_FILES = 3
    REGISTER_EVENTFD = 4
    UNREGISTER_EVENTFD = 5
    REGISTER_FILES_UPDATE = 6
    REGISTER_EVENTFD_ASYNC = 7
    REGISTER_PROBE = 8
    REGISTER_PERSONALITY = 9
    UNREGISTER_PERSONALITY = 10
    REGISTER_RESTRICTIONS = 11
    REGISTER_ENABLE_RINGS = 12
    REGISTER_FILES2 = 13
    REGISTER_FILES_UPDATE2 = 14
    REGISTER_BUFFERS2 = 15
    REGISTER_BUFFERS_UPDATE = 16
    REGISTER_IOWQ_AFF = 17
    UNREGISTER_IOWQ_AFF = 18
    REGISTER_IOWQ_MAX_WORKERS = 19
    REGISTER_RING_FDS = 20
    UNREGISTER_RING_FDS = 21
    REGISTER_PBUF_RING = 22
    UNREGISTER_PBUF_RING = 23
    REGISTER_SYNC_CANCEL = 24
    REGISTER_FILE_ALLOC_RANGE = 25
    REGISTER_PBUF_STATUS = 26
    REGISTER_NAPI = 27
    UNREGISTER_NAPI = 28
    REGISTER_CLOCK = 29
    REGISTER_CLONE_BUFFERS = 30
    REGISTER_SEND_MSG_RING = 31
    REGISTER_ZCRX_IFQ = 32
    REGISTER_RESIZE_RINGS = 33
    REGISTER_MEM_REGION = 34
    REGISTER_QUERY = 35


class Op(IntEnum):
    """`IORING_OP_*`. A kernel may know more than these; a probe lists them by number."""

    NOP = 0
    READV = 1
    WRITEV = 2
    FSYNC = 3
    READ_FIXED = 4
    WRITE_FIXED = 5
    POLL_ADD = 6
    POLL_REMOVE = 7
    SYNC_FILE_RANGE = 8
    SENDMSG = 9
    RECVMSG = 10
    TIMEOUT = 11
    TIMEOUT_REMOVE = 12
    ACCEPT = 13
    ASYNC_CANCEL = 14
    LINK_TIMEOUT = 15
    CONNECT = 16
    FALLOCATE = 17
    OPENAT = 18
    CLOSE = 19
    FILES_UPDATE = 20
    STATX = 21
    READ = 22
    WRITE = 23
    FADVISE = 24
    MADVISE = 25
    SEND = 26
    RECV = 27
    OPENAT2 = 28
    EPOLL_CTL = 29
    SPLICE = 30
    PROVIDE_BUFFERS = 31
    REMOVE_BUFFERS = 32
    TEE = 33
    SHUTDOWN = 34
    RENAMEAT = 35
    UNLINKAT = 36
    MKDIRAT = 37
    SYMLINKAT = 38
    LINKAT = 39
    MSG_RING = 40
    FSETXATTR = 41
    SETXATTR = 42
    FGETXATTR = 43
    GETXATTR = 44
    SOCKET = 45
    URING_CMD = 46
    SEND_ZC = 47
    SENDMSG_ZC = 48
    READ_MULTISHOT = 49
    WAITID = 50
    FUTEX_WAIT = 51
    FUTEX_WAKE = 52
    FUTEX_WAITV = 53
    FIXED_FD_INSTALL = 54
    FTRUNCATE = 55
    BIND = 56
    LISTEN = 57
    RECV_ZC = 58
    EPOLL_WAIT = 59
    READV_FIXED = 60
    WRITEV_FIXED = 61
    PIPE = 62
    NOP128 = 63
    URING_CMD128 = 64


FSYNC_DATASYNC = 1 << 0
POLL_ADD_MULTI = 1 << 0
URING_CMD_FIXED = 1 << 0
RSRC_REGISTER_SPARSE = 1 << 0
REGISTER_SRC_REGISTERED = 1 << 0
REGISTER_DST_REPLACE = 1 << 1
PROBE_OP_SUPPORTED = 1 << 0
AT_FDCWD = -100
OFFSET_CURRENT = (1 << 64) - 1
"""An offset of all ones: use, and move, the file's own position."""
