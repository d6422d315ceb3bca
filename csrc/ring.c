/* SPDX-License-Identifier: Apache-2.0 */
#include "ring.h"

#include <fcntl.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A submit that the kernel answers with EAGAIN or EBUSY is tried again this often, reaping between
 * the tries; then the ring counts as poisoned. */
enum { SUBMIT_TRIES = 64, BUFFER_TABLE = 64 };

struct kvio_ring {
  struct io_uring uring;
  struct kvio_ring_caps caps;
  int fds[KVIO_MAX_MEMBERS];
  uint32_t n_fds;
  int end_fd; /* read end of the pipe of R4, -1 = none */
  uint32_t entries;
  bool big;
  bool iopoll;
  bool own_thread;
};

static int try_setup(struct kvio_ring *ring, const struct kvio_ring_opts *opts, uint32_t flags)
{
  struct io_uring_params params;
  memset(&params, 0, sizeof(params));
  params.flags = flags | IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP;
  params.cq_entries = opts->entries * 2;
  if (flags & IORING_SETUP_SQPOLL)
    params.sq_thread_idle = 50;
  int rc = io_uring_queue_init_params(opts->entries, &ring->uring, &params);
  if (rc == 0)
    ring->caps.flags = params.flags;
  return rc;
}

/* liburing fills the queue of indices once, at its setup, and then leaves it alone; a version that
 * fills it with each submission would undo take_sqe(). */
static bool indices_are_ours(const struct kvio_ring *ring)
{
  const struct io_uring_sq *sq = &ring->uring.sq;
  for (uint32_t i = 0; i < sq->ring_entries; i++)
    if (sq->array[i] != i)
      return false;
  return true;
}

int kvio_ring_create(struct kvio_ring **out, const struct kvio_ring_opts *opts)
{
  struct kvio_ring *ring = calloc(1, sizeof(*ring));
  if (!ring)
    return -ENOMEM;
  uint32_t fixed = 0;
  if (opts->own_thread)
    fixed |= IORING_SETUP_R_DISABLED;
  if (opts->big)
    fixed |= IORING_SETUP_SQE128 | IORING_SETUP_CQE32;
  if (opts->iopoll)
    fixed |= IORING_SETUP_IOPOLL;
  if (opts->sqpoll)
    fixed |= IORING_SETUP_SQPOLL;
  /* DEFER_TASKRUN needs SINGLE_ISSUER and is refused with SQPOLL: they are tried together, then
   * dropped together. SUBMIT_ALL last: without it one bad SQE ends a submission early. */
  const uint32_t submit_all = IORING_SETUP_SUBMIT_ALL;
  const uint32_t deferred =
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
  const uint32_t cooperative = IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
  const uint32_t ladder[] = {opts->sqpoll ? submit_all : deferred | submit_all,
                             opts->sqpoll ? submit_all : cooperative | submit_all, submit_all, 0};
  int rc = -EINVAL;
  for (size_t i = 0; i < sizeof(ladder) / sizeof(*ladder) && rc == -EINVAL; i++)
    rc = try_setup(ring, opts, fixed | ladder[i]);
  if (rc) {
    free(ring);
    return rc;
  }
  if (opts->big && !indices_are_ours(ring)) {
    io_uring_queue_exit(&ring->uring);
    free(ring);
    return -EOPNOTSUPP;
  }
  ring->entries = opts->entries;
  ring->big = opts->big;
  ring->iopoll = opts->iopoll;
  ring->own_thread = opts->own_thread;
  ring->end_fd = -1;
  /* A child that touches the parent's ring corrupts it: it does not get the mapping. */
  io_uring_ring_dontfork(&ring->uring);
  *out = ring;
  return 0;
}

int kvio_ring_enable(struct kvio_ring *ring)
{
  if (ring->caps.flags & IORING_SETUP_R_DISABLED) {
    int rc = io_uring_enable_rings(&ring->uring);
    if (rc < 0)
      return rc;
    ring->caps.flags &= ~IORING_SETUP_R_DISABLED;
  }
  if (ring->own_thread)
    ring->caps.ring_fd = io_uring_register_ring_fd(&ring->uring) == 1;
  ring->caps.buffers = io_uring_register_buffers_sparse(&ring->uring, BUFFER_TABLE) == 0;
  return 0;
}

static void free_ring(struct kvio_ring *ring)
{
  io_uring_queue_exit(&ring->uring);
  free(ring);
}

int kvio_ring_destroy(struct kvio_ring *ring)
{
  int fd = ring->end_fd;
  /* SINGLE_ISSUER refuses this to other threads. */
  if (fd >= 0 && io_uring_unregister_files(&ring->uring) == 0) {
    close(fd);
    fd = -1;
  }
  free_ring(ring);
  return fd;
}

int kvio_ring_close(struct kvio_ring *ring)
{
  int fd = ring->end_fd;
  if (fd < 0)
    return -EOPNOTSUPP;
  free_ring(ring);
  return fd;
}

const struct kvio_ring_caps *kvio_ring_caps(const struct kvio_ring *ring)
{
  return &ring->caps;
}

void kvio_ring_set_files(struct kvio_ring *ring, const int *fds, uint32_t n)
{
  KVIO_ASSERT(n <= KVIO_MAX_MEMBERS);
  int ends[2];
  bool pipe_made = pipe2(ends, O_CLOEXEC) == 0; /* without it a ring cannot be given up, no more */
  int table[KVIO_MAX_MEMBERS + 1];
  memcpy(table, fds, n * sizeof(*fds));
  if (pipe_made)
    table[n] = ends[1];
  memcpy(ring->fds, fds, n * sizeof(*fds));
  ring->n_fds = n;
  ring->caps.files = io_uring_register_files(&ring->uring, table, n + pipe_made) == 0;
  if (!pipe_made)
    return;
  close(ends[1]);
  if (ring->caps.files)
    ring->end_fd = ends[0];
  else
    close(ends[0]);
}

int kvio_ring_set_buffer(struct kvio_ring *ring, uint32_t slot, const struct iovec *iov)
{
  KVIO_ASSERT(slot < BUFFER_TABLE);
  if (!ring->caps.buffers)
    return -EOPNOTSUPP;
  int rc = io_uring_register_buffers_update_tag(&ring->uring, slot, iov, NULL, 1);
  return rc == 1 ? 0 : rc < 0 ? rc : -EINVAL;
}

/* R5: a big ring's SQE lies where its token says, and stays until the request is over. Only the
 * queue of indices in front of the SQEs goes round. */
static struct io_uring_sqe *take_sqe(struct kvio_ring *ring, uint64_t token)
{
  struct io_uring_sq *sq = &ring->uring.sq;
  struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);
  if (!sqe || !ring->big)
    return sqe;
  uint32_t last = ring->entries - 1;
  uint32_t home = (uint32_t)token == UINT32_MAX ? last : (uint32_t)token;
  KVIO_ASSERT(home < last || token == UINT64_MAX);
  sq->array[(sq->sqe_tail - 1) & sq->ring_mask] = home;
  return &sq->sqes[(size_t)home << 1];
}

static void set_file(struct kvio_ring *ring, struct io_uring_sqe *sqe, uint32_t file)
{
  KVIO_ASSERT(file < ring->n_fds);
  if (ring->caps.files) {
    sqe->fd = (int)file;
    sqe->flags |= IOSQE_FIXED_FILE;
  } else {
    sqe->fd = ring->fds[file];
  }
}

bool kvio_ring_prep_rw(struct kvio_ring *ring, bool write, uint32_t file, void *addr,
                       uint32_t length, uint64_t offset, int buffer_slot, uint64_t token)
{
  struct io_uring_sqe *sqe = take_sqe(ring, token);
  if (!sqe)
    return false;
  if (buffer_slot >= 0)
    io_uring_prep_rw(write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED, sqe, -1, addr, length,
                     offset);
  else
    io_uring_prep_rw(write ? IORING_OP_WRITE : IORING_OP_READ, sqe, -1, addr, length, offset);
  if (buffer_slot >= 0)
    sqe->buf_index = (uint16_t)buffer_slot;
  set_file(ring, sqe, file);
  io_uring_sqe_set_data64(sqe, token);
  return true;
}

bool kvio_ring_prep_rwv(struct kvio_ring *ring, bool write, uint32_t file, const struct iovec *iov,
                        uint32_t n_iov, uint64_t offset, uint64_t token)
{
  struct io_uring_sqe *sqe = take_sqe(ring, token);
  if (!sqe)
    return false;
  io_uring_prep_rw(write ? IORING_OP_WRITEV : IORING_OP_READV, sqe, -1, iov, n_iov, offset);
  set_file(ring, sqe, file);
  io_uring_sqe_set_data64(sqe, token);
  return true;
}

bool kvio_ring_prep_cmd(struct kvio_ring *ring, uint32_t file, uint32_t cmd_op, const void *cmd,
                        size_t cmd_size, int buffer_slot, uint64_t token)
{
  KVIO_ASSERT(ring->big && cmd_size <= 80);
  struct io_uring_sqe *sqe = take_sqe(ring, token);
  if (!sqe)
    return false;
  memset(sqe, 0, 2 * sizeof(*sqe));
  sqe->opcode = IORING_OP_URING_CMD;
  sqe->cmd_op = cmd_op;
  if (buffer_slot >= 0) {
    sqe->rw_flags = 1; /* IORING_URING_CMD_FIXED (Linux 6.1), not in liburing 2.3's header */
    sqe->buf_index = (uint16_t)buffer_slot;
  }
  memcpy((char *)sqe + offsetof(struct io_uring_sqe, addr3), cmd, cmd_size);
  set_file(ring, sqe, file);
  io_uring_sqe_set_data64(sqe, token);
  return true;
}

bool kvio_ring_prep_wake(struct kvio_ring *ring, int event_fd, uint64_t *value, uint64_t token)
{
  struct io_uring_sqe *sqe = take_sqe(ring, token);
  if (!sqe)
    return false;
  io_uring_prep_read(sqe, event_fd, value, sizeof(*value), 0);
  io_uring_sqe_set_data64(sqe, token);
  return true;
}

static int enter(struct kvio_ring *ring, uint32_t wait_nr, uint64_t timeout_ns)
{
  if (wait_nr == 0 || timeout_ns == UINT64_MAX)
    return io_uring_submit_and_wait(&ring->uring, wait_nr);
  struct __kernel_timespec ts = {.tv_sec = (long long)(timeout_ns / 1000000000u),
                                 .tv_nsec = (long long)(timeout_ns % 1000000000u)};
  struct io_uring_cqe *cqe;
  return io_uring_submit_and_wait_timeout(&ring->uring, &cqe, wait_nr, &ts, NULL);
}

int kvio_ring_submit_wait(struct kvio_ring *ring, uint32_t wait_nr, uint64_t timeout_ns)
{
  for (int tries = 0; tries < SUBMIT_TRIES; tries++) {
    int rc = enter(ring, wait_nr, timeout_ns);
    if (rc >= 0)
      return 0;
    if (rc == -EINTR || rc == -ETIME)
      return rc;
    if (rc != -EAGAIN && rc != -EBUSY)
      return rc;
    if (io_uring_cq_ready(&ring->uring) != 0)
      return 0; /* reaping makes room; what is still queued goes with the next submit */
    io_uring_get_events(&ring->uring);
  }
  return -EBUSY;
}

static uint32_t take_ready(struct kvio_ring *ring, struct kvio_completion *out, uint32_t max)
{
  struct io_uring_cqe *cqe;
  unsigned head;
  uint32_t n = 0;
  io_uring_for_each_cqe(&ring->uring, head, cqe)
  {
    if (n == max)
      break;
    out[n].token = cqe->user_data;
    out[n].res = cqe->res;
    n++;
  }
  io_uring_cq_advance(&ring->uring, n);
  return n;
}

uint32_t kvio_ring_reap(struct kvio_ring *ring, struct kvio_completion *out, uint32_t max)
{
  /* With DEFER_TASKRUN finished requests become CQEs only when their task enters the kernel. */
  unsigned flags = __atomic_load_n(ring->uring.sq.kflags, __ATOMIC_RELAXED);
  if ((flags & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW)) ||
      (ring->iopoll && io_uring_cq_ready(&ring->uring) == 0))
    io_uring_get_events(&ring->uring);
  return take_ready(ring, out, max);
}

uint32_t kvio_ring_take_unsubmitted(struct kvio_ring *ring, uint64_t *out, uint32_t max)
{
  struct io_uring_sq *sq = &ring->uring.sq;
  unsigned shift = ring->big ? 1 : 0;
  unsigned head = __atomic_load_n(sq->khead, __ATOMIC_ACQUIRE);
  unsigned tail = *sq->ktail;
  uint32_t n = 0;
  /* First what was made visible to the kernel but not consumed, then what was only prepared. */
  for (unsigned i = head; i != tail && n < max; i++)
    out[n++] = sq->sqes[(sq->array[i & sq->ring_mask]) << shift].user_data;
  for (unsigned i = sq->sqe_head; i != sq->sqe_tail && n < max; i++) {
    unsigned index = ring->big ? sq->array[i & sq->ring_mask] : i & sq->ring_mask;
    out[n++] = sq->sqes[(size_t)index << shift].user_data;
  }
  __atomic_store_n(sq->ktail, head, __ATOMIC_RELEASE);
  sq->sqe_head = sq->sqe_tail = head;
  return n;
}
