# SPDX-License-Identifier: Apache-2.0
"""Builds `kvio.uring._liburing`: liburing through cffi's API mode.

`setup.py` names `ffibuilder` of this file in `cffi_modules`; run as a program it builds in place.
liburing goes in statically with its symbols hidden, so that two modules in one process, each with
its own copy, cannot get at each other's. This file imports nothing of kvio: it runs before it.

The C text below fills and reads ring entries in one call each, where liburing's own inline
functions would take a call per field: a cffi call costs more than the work in it. Each call
releases the GIL.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from cffi import FFI


def _static_liburing() -> Path | None:
    """Where the compiler finds liburing.a, or None."""
    command = [*shlex.split(os.environ.get("CC", "cc")), "-print-file-name=liburing.a"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return None
    path = Path(printed.strip())
    # gcc prints the bare name back when it has found nothing
    return path if path.is_absolute() and path.exists() else None


def _liburing_version(archive: Path | None) -> str:
    """The version that pkg-config's file beside the archive states, or "".

    Headers before 2.4 do not say it, and pkg-config itself is often not installed.
    """
    if archive is None:
        return ""
    for line in _lines(archive.parent / "pkgconfig" / "liburing.pc"):
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return ""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


_CDEF = """
typedef struct { ...; } sigset_t;
struct iovec { void *iov_base; size_t iov_len; };
struct __kernel_timespec { long long tv_sec; long long tv_nsec; };

struct io_uring_params {
  uint32_t sq_entries; uint32_t cq_entries; uint32_t flags;
  uint32_t sq_thread_cpu; uint32_t sq_thread_idle; uint32_t features; uint32_t wq_fd; ...;
};
struct io_uring_sqe;
struct io_uring_sq { struct io_uring_sqe *sqes; unsigned ring_entries; ...; };
struct io_uring_cq { unsigned ring_entries; ...; };
struct io_uring {
  struct io_uring_sq sq; struct io_uring_cq cq;
  unsigned flags; int ring_fd; unsigned features; int enter_ring_fd; ...;
};
struct io_uring_probe_op { uint8_t op; uint16_t flags; ...; };
struct io_uring_probe { uint8_t last_op; uint8_t ops_len; ...; };

int io_uring_queue_init_params(unsigned, struct io_uring *, struct io_uring_params *);
void io_uring_queue_exit(struct io_uring *);
int io_uring_ring_dontfork(struct io_uring *);
int io_uring_submit(struct io_uring *);
int io_uring_get_events(struct io_uring *);
unsigned io_uring_sq_ready(const struct io_uring *);
unsigned io_uring_sq_space_left(const struct io_uring *);
unsigned io_uring_cq_ready(const struct io_uring *);
bool io_uring_cq_has_overflow(const struct io_uring *);
bool io_uring_cq_eventfd_enabled(const struct io_uring *);
int io_uring_cq_eventfd_toggle(struct io_uring *, bool);
int io_uring_enable_rings(struct io_uring *);
int io_uring_register_buffers(struct io_uring *, const struct iovec *, unsigned);
int io_uring_register_buffers_sparse(struct io_uring *, unsigned);
int io_uring_register_buffers_update_tag(struct io_uring *, unsigned, const struct iovec *,
                                         const unsigned long long *, unsigned);
int io_uring_unregister_buffers(struct io_uring *);
int io_uring_register_files(struct io_uring *, const int *, unsigned);
int io_uring_register_files_sparse(struct io_uring *, unsigned);
int io_uring_register_files_update(struct io_uring *, unsigned, const int *, unsigned);
int io_uring_unregister_files(struct io_uring *);
int io_uring_register_eventfd(struct io_uring *, int);
int io_uring_register_eventfd_async(struct io_uring *, int);
int io_uring_unregister_eventfd(struct io_uring *);
int io_uring_register_ring_fd(struct io_uring *);
int io_uring_unregister_ring_fd(struct io_uring *);
int io_uring_register_iowq_max_workers(struct io_uring *, unsigned int *);

int kvio_uring_prep(struct io_uring *ring, unsigned op, unsigned flags, int fd, uint64_t addr,
                    uint32_t len, uint64_t off, uint32_t op_flags, uint64_t user_data,
                    unsigned ioprio, unsigned buf_index, uint32_t file_index, uint64_t addr3);
int kvio_uring_prep_cmd(struct io_uring *ring, unsigned flags, int fd, uint32_t cmd_op,
                        const void *cmd, size_t cmd_size, uint32_t cmd_flags, uint64_t user_data,
                        unsigned buf_index);
int kvio_uring_wait(struct io_uring *ring, unsigned count, int64_t timeout_ns);
int kvio_uring_submit_and_wait(struct io_uring *ring, unsigned count, int64_t timeout_ns);
int kvio_uring_reap(struct io_uring *ring, uint64_t *user_data, int32_t *res, uint32_t *flags,
                    uint64_t *big, unsigned max);
unsigned kvio_uring_discard(struct io_uring *ring, uint64_t *user_data, unsigned max);
int kvio_uring_cancel_all(struct io_uring *ring);
int kvio_uring_probe(struct io_uring *ring, uint8_t *supported, unsigned max);
int kvio_uring_register(struct io_uring *ring, unsigned opcode, const void *arg, unsigned nr);
int kvio_uring_clone_buffers(struct io_uring *dst, struct io_uring *src);
void kvio_uring_forget_registered_fd(struct io_uring *ring);
static const char *const kvio_uring_version;
"""

_SOURCE = r"""
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <liburing.h>
#ifndef KVIO_LIBURING_VERSION
#define KVIO_LIBURING_VERSION ""
#endif

static const char *const kvio_uring_version = KVIO_LIBURING_VERSION;

static struct io_uring_sqe *kvio_uring_clean_sqe(struct io_uring *ring)
{
  struct io_uring_sqe *sqe = io_uring_get_sqe(ring);

  if (sqe) /* a wide entry's second half would otherwise keep an older command */
    memset(sqe, 0, sizeof(*sqe) << !!(ring->flags & IORING_SETUP_SQE128));
  return sqe;
}

static int kvio_uring_prep(struct io_uring *ring, unsigned op, unsigned flags, int fd,
                           uint64_t addr, uint32_t len, uint64_t off, uint32_t op_flags,
                           uint64_t user_data, unsigned ioprio, unsigned buf_index,
                           uint32_t file_index, uint64_t addr3)
{
  struct io_uring_sqe *sqe = kvio_uring_clean_sqe(ring);

  if (!sqe)
    return -EAGAIN;
  io_uring_prep_rw((int)op, sqe, fd, (const void *)(uintptr_t)addr, len, off);
  sqe->flags = (uint8_t)flags;
  sqe->rw_flags = op_flags;
  sqe->user_data = user_data;
  sqe->ioprio = (uint16_t)ioprio;
  sqe->buf_index = (uint16_t)buf_index;
  sqe->file_index = file_index;
  sqe->addr3 = addr3;
  return 0;
}

static int kvio_uring_prep_cmd(struct io_uring *ring, unsigned flags, int fd, uint32_t cmd_op,
                               const void *cmd, size_t cmd_size, uint32_t cmd_flags,
                               uint64_t user_data, unsigned buf_index)
{
  size_t room = ring->flags & IORING_SETUP_SQE128 ? 80 : 16;
  struct io_uring_sqe *sqe;

  if (cmd_size > room)
    return -EMSGSIZE;
  sqe = kvio_uring_clean_sqe(ring);
  if (!sqe)
    return -EAGAIN;
  sqe->opcode = IORING_OP_URING_CMD;
  sqe->flags = (uint8_t)flags;
  sqe->fd = fd;
  sqe->cmd_op = cmd_op;
  sqe->uring_cmd_flags = cmd_flags;
  sqe->user_data = user_data;
  sqe->buf_index = (uint16_t)buf_index;
  memcpy((char *)sqe + 48, cmd, cmd_size);
  return 0;
}

static void kvio_uring_timespec(struct __kernel_timespec *ts, int64_t ns)
{
  ts->tv_sec = ns / 1000000000;
  ts->tv_nsec = ns % 1000000000;
}

/* timeout_ns < 0 waits without limit. Never submits: the caller checks IORING_FEAT_EXT_ARG, and
 * without that feature liburing would put a timeout request of its own into the queue. */
static int kvio_uring_wait(struct io_uring *ring, unsigned count, int64_t timeout_ns)
{
  struct __kernel_timespec ts;
  struct io_uring_cqe *cqe;

  if (timeout_ns < 0)
    return io_uring_wait_cqes(ring, &cqe, count, NULL, NULL);
  kvio_uring_timespec(&ts, timeout_ns);
  return io_uring_wait_cqes(ring, &cqe, count, &ts, NULL);
}

static int kvio_uring_submit_and_wait(struct io_uring *ring, unsigned count, int64_t timeout_ns)
{
  struct __kernel_timespec ts;
  struct io_uring_cqe *cqe;

  if (timeout_ns < 0)
    return io_uring_submit_and_wait(ring, count);
  kvio_uring_timespec(&ts, timeout_ns);
  return io_uring_submit_and_wait_timeout(ring, &cqe, count, &ts, NULL);
}

static bool kvio_uring_must_enter(const struct io_uring *ring)
{
  const unsigned modes = IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_IOPOLL;
  const unsigned waiting = IORING_SQ_CQ_OVERFLOW | IORING_SQ_TASKRUN;

  return (ring->flags & modes) || (IO_URING_READ_ONCE(*ring->sq.kflags) & waiting);
}

static unsigned kvio_uring_copy_cqes(struct io_uring *ring, uint64_t *user_data, int32_t *res,
                                     uint32_t *flags, uint64_t *big, unsigned max)
{
  bool wide = ring->flags & IORING_SETUP_CQE32;
  struct io_uring_cqe *cqe;
  unsigned head, n = 0;

  io_uring_for_each_cqe(ring, head, cqe) {
    if (n == max)
      break;
    user_data[n] = cqe->user_data;
    res[n] = cqe->res;
    flags[n] = cqe->flags;
    if (wide && big)
      memcpy(big + 2 * n, cqe->big_cqe, 16);
    n++;
  }
  io_uring_cq_advance(ring, n);
  return n;
}

/* Copies and consumes up to max completions, those that the kernel has still to post included.
 * Returns their number or -errno; big may be NULL. */
static int kvio_uring_reap(struct io_uring *ring, uint64_t *user_data, int32_t *res,
                           uint32_t *flags, uint64_t *big, unsigned max)
{
  unsigned n = kvio_uring_copy_cqes(ring, user_data, res, flags, big, max);

  while (n < max && kvio_uring_must_enter(ring)) {
    int ret = io_uring_get_events(ring);
    unsigned more;

    if (ret < 0)
      return n ? (int)n : ret; /* the error will be there the next time, too */
    more = kvio_uring_copy_cqes(ring, user_data + n, res + n, flags + n,
                                big ? big + 2 * n : NULL, max - n);
    n += more;
    if (!more)
      break;
  }
  return (int)n;
}

/* Takes back the entries that the kernel has not consumed, and reports their user_data. The tail
 * that the kernel sees is set right by the next submit, and it is not looked at before that. A
 * polling kernel thread does look, so there only what was never submitted can be taken back. */
static unsigned kvio_uring_discard(struct io_uring *ring, uint64_t *user_data, unsigned max)
{
  struct io_uring_sq *sq = &ring->sq;
  bool polled = ring->flags & IORING_SETUP_SQPOLL;
  unsigned shift = !!(ring->flags & IORING_SETUP_SQE128);
  unsigned from = polled ? sq->sqe_head : IO_URING_READ_ONCE(*sq->khead);
  unsigned at, n = 0;

  for (at = from; at != sq->sqe_tail && n < max; at++)
    user_data[n++] = sq->sqes[(at & sq->ring_mask) << shift].user_data;
  sq->sqe_tail = from;
  sq->sqe_head = from;
  return n;
}

/* Asks the kernel to cancel what can be cancelled, without waiting and without an entry. */
static int kvio_uring_cancel_all(struct io_uring *ring)
{
  struct io_uring_sync_cancel_reg reg;

  memset(&reg, 0, sizeof(reg));
  reg.fd = -1;
  reg.flags = IORING_ASYNC_CANCEL_ALL | IORING_ASYNC_CANCEL_ANY;
  return io_uring_register_sync_cancel(ring, &reg);
}

/* supported[op] = 1 for each opcode below max. Returns the number of opcodes known or -errno. */
static int kvio_uring_probe(struct io_uring *ring, uint8_t *supported, unsigned max)
{
  struct io_uring_probe *probe = calloc(1, sizeof(*probe) + max * sizeof(probe->ops[0]));
  int ret;

  if (!probe)
    return -ENOMEM;
  ret = io_uring_register_probe(ring, probe, max);
  if (!ret) {
    for (unsigned i = 0; i < probe->ops_len && i < max; i++)
      supported[probe->ops[i].op] = !!(probe->ops[i].flags & IO_URING_OP_SUPPORTED);
    ret = probe->last_op + 1;
  }
  free(probe);
  return ret;
}

static int kvio_uring_register(struct io_uring *ring, unsigned opcode, const void *arg,
                               unsigned nr)
{
  return io_uring_register((unsigned)ring->ring_fd, opcode, arg, nr);
}

/* IORING_REGISTER_CLONE_BUFFERS (Linux 6.12), newer than the liburing this must build with */
static int kvio_uring_clone_buffers(struct io_uring *dst, struct io_uring *src)
{
  struct { uint32_t src_fd, flags, src_off, dst_off, nr, pad[3]; } arg = {
    .src_fd = (uint32_t)src->ring_fd,
  };

  return io_uring_register((unsigned)dst->ring_fd, 30, &arg, 1);
}

/* The index of a registered ring belongs to the thread that registered it; another thread that
 * gives it back would give back a ring of its own. */
static void kvio_uring_forget_registered_fd(struct io_uring *ring)
{
  ring->int_flags = 0;
  ring->enter_ring_fd = ring->ring_fd;
}
"""

_archive = _static_liburing()
_version = _liburing_version(_archive)

ffibuilder = FFI()
ffibuilder.cdef(_CDEF)
ffibuilder.set_source(
    "kvio.uring._liburing",
    _SOURCE,
    define_macros=[
        ("_GNU_SOURCE", "1"),
        *([("KVIO_LIBURING_VERSION", f'"{_version}"')] if _version else []),
    ],
    extra_compile_args=["-fvisibility=hidden"],
    extra_link_args=["-Wl,--exclude-libs,ALL", str(_archive) if _archive else "-luring"],
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        built = Path(ffibuilder.compile(tmpdir=folder))
        here = Path(__file__).resolve().parent
        for older in here.glob("_liburing.*.so"):  # of another name, it might be imported instead
            older.unlink()
        shutil.copy2(built, here / built.name)
