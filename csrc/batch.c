/* SPDX-License-Identifier: Apache-2.0
 *
 * The way out: segments complete, the batch finishes or expires, somebody is told, memory goes.
 */
#include "batch.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_RETRIES = 64, INTERRUPT_TICK_NS = 100 * 1000 * 1000, LARGEST_CACHED_BLOCK = 1 << 20 };

static long futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout)
{
  return syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, timeout, NULL, 0);
}

/* Publishes an end state and wakes whoever waits for it. */
static void announce(struct kvio_batch *batch, enum kvio_batch_state state)
{
  /* seq_cst: pairs with kvio_batch_wait (waiters), kvio_batch_eventfd (event_fd) and
   * kvio_batch_notify (notifier), where the other side writes its own word first and reads state
   * afterwards. */
  atomic_store(&batch->state, state);
  if (atomic_load(&batch->waiters) != 0)
    futex(&batch->state, FUTEX_WAKE, INT_MAX, NULL);
  if (atomic_load(&batch->notifier))
    kvio_notify_deliver(batch);
  int fd = atomic_load(&batch->event_fd);
  if (fd >= 0)
    kvio_event_signal(fd);
}

static bool state_expired(const struct kvio_batch *batch)
{
  uint32_t state = atomic_load_explicit(&batch->state, memory_order_acquire);
  return state == KVIO_BATCH_EXPIRING || state == KVIO_BATCH_EXPIRED;
}

/* Bytes without a gap from the op's start, or -errno of its first bad segment. */
static int64_t op_result(const struct kvio_batch *batch, const struct kvio_op_state *op)
{
  if (op->refused)
    return op->refused;
  uint64_t bytes = 0;
  bool gap = false;
  for (uint32_t i = 0; i < op->n_segs; i++) {
    const struct kvio_seg *seg = &batch->segs[op->first_seg + i];
    /* acquire: pairs with the compare-and-swap in kvio_seg_complete */
    int32_t res = atomic_load_explicit(&seg->res, memory_order_acquire);
    if (res == KVIO_SEG_PENDING)
      return KVIO_PENDING;
    if (res == KVIO_SEG_ABANDONED)
      return batch->expire_code;
    /* Whoever was to execute it may see that the batch has ended before expire() comes to it. */
    if (res == -ECANCELED && state_expired(batch))
      return batch->expire_code;
    if (res < 0)
      return res;
    if (!gap)
      bytes += (uint64_t)seg->done + seg->tail;
    gap = gap || (uint64_t)seg->done + seg->tail < seg->length;
  }
  if (batch->opcode > KVIO_WRITE)
    return (int64_t)op->length;
  /* An expired batch copies nothing any more: what its bounce buffers hold does not count. */
  if (op->bounce && batch->opcode == KVIO_READ && state_expired(batch))
    return batch->expire_code;
  bytes = bytes > op->head ? bytes - op->head : 0;
  return (int64_t)kvio_min_u64(bytes, op->length);
}

static void copy_out(const struct kvio_batch *batch, const struct kvio_op_state *op, int64_t bytes)
{
  const char *from = (const char *)op->bounce + op->head;
  for (uint32_t i = 0; i < op->n_iov && bytes > 0; i++) {
    const struct iovec *iov = &batch->iovs[op->iov + i];
    size_t n = kvio_min_u64(iov->iov_len, (uint64_t)bytes);
    memcpy(iov->iov_base, from, n);
    from += n;
    bytes -= (int64_t)n;
  }
}

static void finish_ops(struct kvio_batch *batch, struct kvio_stat_block *stat)
{
  if (batch->opcode > KVIO_WRITE)
    return;
  struct kvio_io_counters *io = &stat->op[batch->opcode];
  uint64_t bytes = 0, errors = 0;
  for (uint32_t i = 0; i < batch->n_ops; i++) {
    const struct kvio_op_state *op = &batch->ops[i];
    int64_t result = op_result(batch, op);
    if (result < 0)
      errors++;
    else
      bytes += (uint64_t)result;
    if (op->bounce) {
      kvio_count(&stat->bounced, 1);
      if (batch->opcode == KVIO_READ && result > 0)
        copy_out(batch, op, result);
    }
    uint64_t first = UINT64_MAX, last = 0;
    for (uint32_t k = 0; k < op->n_segs; k++) {
      const struct kvio_seg *seg = &batch->segs[op->first_seg + k];
      first = kvio_min_u64(first, seg->t_issue);
      last = kvio_max_u64(last, seg->t_done);
    }
    if (op->n_segs > 0)
      kvio_hist_add(&io->latency, last > first ? last - first : 0);
  }
  kvio_count(&io->ops, batch->n_ops);
  kvio_count(&io->bytes, bytes);
  kvio_count(&io->errors, errors);
}

static _Atomic uint32_t *active_count(const struct kvio_batch *batch)
{
  return batch->opcode == KVIO_READ ? &batch->shared->active_reads : &batch->shared->active_others;
}

static void last_segment(struct kvio_batch *batch, struct kvio_stat_block *stat)
{
  atomic_fetch_sub_explicit(active_count(batch), 1, memory_order_relaxed);
  uint32_t running = KVIO_BATCH_RUNNING;
  if (atomic_compare_exchange_strong(&batch->state, &running, KVIO_BATCH_FINISHING)) {
    finish_ops(batch, stat);
    announce(batch, KVIO_BATCH_DONE);
  }
  kvio_batch_put(batch);
}

/* For a batch that ends outside of a lane: there is no single writer of its statistics. */
static void count_loose(struct kvio_batch *batch)
{
  if (batch->opcode > KVIO_WRITE)
    return;
  struct kvio_loose_counters *loose = &batch->shared->loose[batch->opcode];
  uint64_t bytes = 0, errors = 0;
  for (uint32_t i = 0; i < batch->n_ops; i++) {
    int64_t result = op_result(batch, &batch->ops[i]);
    errors += result < 0;
    bytes += result > 0 ? (uint64_t)result : 0;
  }
  atomic_fetch_add_explicit(&loose->ops, batch->n_ops, memory_order_relaxed);
  atomic_fetch_add_explicit(&loose->bytes, bytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&loose->errors, errors, memory_order_relaxed);
}

void kvio_batch_start(struct kvio_batch *batch)
{
  if (batch->n_segs == 0) {
    count_loose(batch);
    atomic_store(&batch->state, KVIO_BATCH_DONE);
    return;
  }
  kvio_batch_ref(batch); /* the engine's (T2) */
  atomic_fetch_add_explicit(active_count(batch), 1, memory_order_relaxed);
}

static void count_segment(struct kvio_seg *seg, int code, struct kvio_member *member,
                          struct kvio_stat_block *stat)
{
  if (seg->opcode > KVIO_WRITE) {
    if (seg->opcode == KVIO_FLUSH)
      atomic_fetch_add_explicit(&member->flushes, 1, memory_order_relaxed);
    else
      atomic_fetch_add_explicit(&member->discards, 1, memory_order_relaxed);
    return;
  }
  if (seg->t_issue == 0)
    return; /* cancelled before it was sent */
  struct kvio_io_counters *io = &stat->member[seg->member].io[seg->opcode];
  kvio_count(&io->ops, 1);
  if (code)
    kvio_count(&io->errors, 1);
  else
    kvio_count(&io->bytes, (uint64_t)seg->done + seg->tail);
  kvio_hist_add(&io->latency, seg->t_done - seg->t_issue);
  if (code == 0 && atomic_load_explicit(&member->strikes, memory_order_relaxed) != 0)
    atomic_store_explicit(&member->strikes, 0, memory_order_relaxed);
}

void kvio_seg_complete(struct kvio_seg *seg, int code, uint64_t now, struct kvio_stat_block *stat)
{
  struct kvio_batch *batch = seg->batch;
  struct kvio_shared *shared = batch->shared;
  seg->t_done = now;
  count_segment(seg, code, &shared->members[seg->member], stat);
  int32_t pending = KVIO_SEG_PENDING;
  int64_t length = (int64_t)seg->length;
  /* release: what the segment brought is seen by whoever reads its result (acquire) */
  bool late = !atomic_compare_exchange_strong_explicit(&seg->res, &pending, code,
                                                       memory_order_acq_rel, memory_order_relaxed);
  KVIO_ASSERT(!late || pending == KVIO_SEG_ABANDONED);
  if (atomic_fetch_sub_explicit(&batch->pending, 1, memory_order_acq_rel) == 1)
    last_segment(batch, stat);
  if (KVIO_UNLIKELY(late)) {
    /* After the owner was given back: a gauge of 0 says that all buffers can be had. release: pairs
     * with the load of kvio_volume_stats */
    atomic_fetch_sub_explicit(&shared->quarantined_bytes, length, memory_order_release);
    atomic_fetch_sub_explicit(&shared->quarantined_buffers, 1, memory_order_release);
  }
}

bool kvio_batch_expire(struct kvio_batch *batch, int code)
{
  uint32_t running = KVIO_BATCH_RUNNING;
  if (!atomic_compare_exchange_strong(&batch->state, &running, KVIO_BATCH_EXPIRING))
    return false;
  struct kvio_shared *shared = batch->shared;
  batch->expire_code = code;
  for (uint32_t i = 0; i < batch->n_segs; i++) {
    struct kvio_seg *seg = &batch->segs[i];
    /* Counted first: the completion that finds ABANDONED takes it off again. */
    atomic_fetch_add_explicit(&shared->quarantined_buffers, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&shared->quarantined_bytes, (int64_t)seg->length,
                              memory_order_relaxed);
    int32_t pending = KVIO_SEG_PENDING;
    if (atomic_compare_exchange_strong_explicit(&seg->res, &pending, KVIO_SEG_ABANDONED,
                                                memory_order_acq_rel, memory_order_acquire)) {
      if (code == -ETIME)
        atomic_fetch_add_explicit(&shared->members[seg->member].strikes, 1, memory_order_relaxed);
      continue;
    }
    atomic_fetch_sub_explicit(&shared->quarantined_buffers, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&shared->quarantined_bytes, (int64_t)seg->length,
                              memory_order_relaxed);
  }
  if (code == -ETIME)
    atomic_fetch_add_explicit(&shared->deadline_exceeded, 1, memory_order_relaxed);
  count_loose(batch);
  announce(batch, KVIO_BATCH_EXPIRED);
  return true;
}

static void advance_iov(struct kvio_seg *seg, uint32_t bytes)
{
  if (seg->n_iov == 1) {
    seg->addr = (char *)seg->addr + bytes;
    return;
  }
  struct iovec *iov = seg->iov;
  uint16_t n = seg->n_iov;
  while (bytes >= iov->iov_len && n > 1) {
    bytes -= (uint32_t)iov->iov_len;
    iov++;
    n--;
  }
  iov->iov_base = (char *)iov->iov_base + bytes;
  iov->iov_len -= bytes;
  seg->n_iov = n;
  if (n == 1)
    seg->addr = iov->iov_base;
  else
    seg->iov = iov;
}

enum kvio_transfer kvio_seg_advance(struct kvio_seg *seg, int64_t result, int *code,
                                    struct kvio_stat_block *stat)
{
  *code = 0;
  if (KVIO_LIKELY(result == (int64_t)kvio_seg_left(seg))) {
    seg->done = (uint32_t)seg->length;
    seg->tail = 0;
    return KVIO_TRANSFER_DONE;
  }
  if (result < 0) {
    if ((result == -EINTR || result == -EAGAIN || result == -ENOMEM) &&
        seg->retries < MAX_RETRIES) {
      seg->retries++;
      kvio_count(&stat->retries, 1);
      kvio_count(&stat->member[seg->member].retries, 1);
      return KVIO_TRANSFER_RETRY;
    }
    *code = (int)result;
    return KVIO_TRANSFER_DONE;
  }
  KVIO_ASSERT(result < (int64_t)kvio_seg_left(seg));
  kvio_count(&stat->short_reads, 1);
  if (seg->opcode == KVIO_WRITE && result == 0) {
    *code = -EIO; /* a write that moves nothing and says no error: never taken for done */
    return KVIO_TRANSFER_DONE;
  }
  /* 0 is the end of the file. Otherwise go on from the last aligned byte; a read that brings no
   * more than the last one's unaligned tail has reached the end too. */
  uint32_t align = seg->batch->shared->members[seg->member].dev.offset_align;
  if (result == 0 || result <= (int64_t)seg->tail) {
    seg->tail = (uint32_t)kvio_max_u64(seg->tail, (uint64_t)result);
    return KVIO_TRANSFER_DONE;
  }
  uint32_t whole = (uint32_t)kvio_align_down((uint64_t)result, align);
  seg->tail = (uint32_t)result - whole;
  seg->done += whole;
  if (whole > 0)
    advance_iov(seg, whole);
  return KVIO_TRANSFER_MORE;
}

bool kvio_batch_done(const struct kvio_batch *batch)
{
  return atomic_load_explicit(&batch->state, memory_order_acquire) >= KVIO_BATCH_DONE;
}

static void to_timespec(struct timespec *ts, uint64_t ns)
{
  ts->tv_sec = (time_t)(ns / 1000000000u);
  ts->tv_nsec = (long)(ns % 1000000000u);
}

int kvio_batch_wait(struct kvio_batch *batch, uint64_t timeout_ns, kvio_interrupt_fn interrupt,
                    void *interrupt_arg)
{
  uint64_t start = kvio_now_ns();
  uint64_t until;
  if (__builtin_add_overflow(start, timeout_ns, &until))
    until = UINT64_MAX;
  int rc = 0;
  if (kvio_shared_forked(batch->shared) && !kvio_batch_done(batch))
    return -EPERM;
  atomic_fetch_add(&batch->waiters, 1); /* before the state is read: see announce */
  for (;;) {
    uint32_t state = atomic_load(&batch->state);
    if (state >= KVIO_BATCH_DONE)
      break;
    uint64_t now = kvio_now_ns();
    if (batch->deadline && now >= batch->deadline) {
      /* The worker does this too, but it may itself be stuck inside the kernel. */
      if (kvio_batch_expire(batch, -ETIME))
        break;
    }
    if (now >= until) {
      rc = -ETIME;
      break;
    }
    uint64_t nap = until - now;
    if (batch->deadline && state == KVIO_BATCH_RUNNING && batch->deadline > now)
      nap = kvio_min_u64(nap, batch->deadline - now);
    if (interrupt)
      nap = kvio_min_u64(nap, INTERRUPT_TICK_NS);
    struct timespec ts;
    to_timespec(&ts, nap);
    futex(&batch->state, FUTEX_WAIT, state, nap == UINT64_MAX ? NULL : &ts);
    if (interrupt && interrupt(interrupt_arg) != 0) {
      rc = -EINTR;
      break;
    }
  }
  atomic_fetch_sub(&batch->waiters, 1);
  return rc;
}

uint32_t kvio_batch_size(const struct kvio_batch *batch)
{
  return batch->n_ops;
}

uint32_t kvio_batch_results(const struct kvio_batch *batch, int64_t *out)
{
  uint32_t failed = 0;
  bool done = kvio_batch_done(batch);
  for (uint32_t i = 0; i < batch->n_ops; i++) {
    /* While it runs nothing is final: a bounced op's bytes are not in the caller's buffer yet. */
    out[i] = done ? op_result(batch, &batch->ops[i]) : KVIO_PENDING;
    failed += done && out[i] < 0;
  }
  return failed;
}

static const char *verb(enum kvio_opcode opcode)
{
  static const char *const verbs[] = {"read", "write", "flush",    "discard",
                                      "open", "close", "register", "unregister"};
  return verbs[opcode];
}

static const char *remedy(int code, enum kvio_error_class cls, enum kvio_opcode opcode)
{
  if (code == -ETIME)
    return "the deadline passed; the buffer stays in quarantine until the member answers";
  switch (cls) {
  case KVIO_CLASS_MEDIA:
    return opcode == KVIO_READ
               ? "unreadable medium; recompute the page and replace the member if it repeats"
               : "the medium takes no data there; replace the member if it repeats";
  case KVIO_CLASS_RESERVATION:
    return "another host holds the reservation; stop writing";
  case KVIO_CLASS_TRANSPORT:
  case KVIO_CLASS_TIMEOUT:
  case KVIO_CLASS_TARGET:
    return "no usable path to the target; see `kvio info` for the path states";
  case KVIO_CLASS_GONE:
    return "the device is gone; open the volume again once it is back";
  case KVIO_CLASS_SPACE:
    return "no room; writes beyond the end of a member or on a full file system fail";
  case KVIO_CLASS_UNSUPPORTED:
    return opcode == KVIO_DISCARD
               ? "this member has no discard (an NVMe character device never does: use its block "
                 "device)"
               : "the member cannot do that; see `kvio info`";
  default:
    return strerror(-code);
  }
}

int kvio_batch_error(const struct kvio_batch *batch, uint32_t i, struct kvio_error *err)
{
  if (i >= batch->n_ops || !kvio_batch_done(batch))
    return 0;
  const struct kvio_op_state *op = &batch->ops[i];
  int64_t result = op_result(batch, op);
  *err = (struct kvio_error){
      .member = op->member, .offset = op->offset, .length = op->asked, .op = batch->opcode};
  if (result >= 0)
    return 0;
  err->code = (int)result;
  const char *path = "the volume";
  for (uint32_t k = 0; k < op->n_segs; k++) {
    const struct kvio_seg *seg = &batch->segs[op->first_seg + k];
    int32_t res = atomic_load_explicit(&seg->res, memory_order_acquire);
    if (res == 0)
      continue;
    err->member = seg->member;
    err->offset = seg->offset;
    err->length = seg->length;
    path = batch->shared->members[seg->member].dev.path;
    path = path ? path : "a member that is closed by now";
    break;
  }
  enum kvio_error_class cls = kvio_error_classify(err->code);
  if (batch->opcode == KVIO_FLUSH)
    snprintf(err->message, sizeof(err->message), "flush of %s failed (%s): %s", path,
             kvio_error_class_name(cls), remedy(err->code, cls, batch->opcode));
  else
    snprintf(err->message, sizeof(err->message),
             "%s of %llu bytes at offset %llu of %s failed (%s): %s", verb(batch->opcode),
             (unsigned long long)err->length, (unsigned long long)err->offset, path,
             kvio_error_class_name(cls), remedy(err->code, cls, batch->opcode));
  return err->code;
}

int kvio_batch_eventfd(struct kvio_batch *batch)
{
  int fd = atomic_load(&batch->event_fd);
  if (fd >= 0)
    return fd;
  fd = kvio_event_acquire(batch->shared);
  if (fd < 0)
    return fd;
  atomic_store(&batch->event_fd, fd);
  /* announce may have come before the store: see there. Not kvio_batch_done(): an acquire load may
   * pass the store. */
  if (atomic_load(&batch->state) >= KVIO_BATCH_DONE)
    kvio_event_signal(fd);
  return fd;
}

void *kvio_batch_take_owner(struct kvio_batch *batch)
{
  /* acquire: pairs with the fetch_sub in kvio_seg_complete */
  if (atomic_load_explicit(&batch->pending, memory_order_acquire) != 0)
    return NULL;
  return atomic_exchange_explicit(&batch->owner, NULL, memory_order_acq_rel);
}

static void free_batch(struct kvio_batch *batch)
{
  struct kvio_shared *shared = batch->shared;
  for (uint32_t i = 0; i < batch->n_ops; i++)
    free(batch->ops[i].bounce);
  int fd = atomic_load(&batch->event_fd);
  if (fd >= 0)
    kvio_event_release(shared, fd);
  size_t *block = (size_t *)batch;
  *block = batch->block_bytes;
  uint32_t start = (uint32_t)((uintptr_t)__builtin_frame_address(0) >> 16);
  for (uint32_t i = 0; i < 4 && *block <= LARGEST_CACHED_BLOCK; i++) {
    void *empty = NULL;
    /* release: pairs with the acquire in take_block */
    if (atomic_compare_exchange_strong_explicit(&shared->blocks[(start + i) % KVIO_BLOCK_POOL],
                                                &empty, block, memory_order_acq_rel,
                                                memory_order_relaxed))
      return;
  }
  free(block);
}

void kvio_batch_put(struct kvio_batch *batch)
{
  if (kvio_shared_forked(batch->shared))
    return; /* the eventfd is the parent's too: a child that drains it would steal a wake-up */
  if (atomic_fetch_sub_explicit(&batch->refs, 1, memory_order_acq_rel) != 1)
    return;
  if (!atomic_load_explicit(&batch->owner, memory_order_acquire)) {
    free_batch(batch);
    return;
  }
  struct kvio_shared *shared = batch->shared;
  struct kvio_batch *head = atomic_load_explicit(&shared->reclaim, memory_order_relaxed);
  do
    batch->reclaim_next = head;
  while (!atomic_compare_exchange_weak_explicit(&shared->reclaim, &head, batch,
                                                memory_order_release, memory_order_relaxed));
}

uint32_t kvio_shared_reclaim(struct kvio_shared *shared, void **owners, uint32_t max)
{
  uint32_t n = 0;
  while (n < max) {
    /* Taking the whole list and putting the rest back avoids ABA. acquire: pairs with the push. */
    struct kvio_batch *list =
        atomic_exchange_explicit(&shared->reclaim, NULL, memory_order_acquire);
    if (!list)
      break;
    while (list && n < max) {
      struct kvio_batch *batch = list;
      list = batch->reclaim_next;
      owners[n++] = atomic_load_explicit(&batch->owner, memory_order_relaxed);
      free_batch(batch);
    }
    while (list) {
      struct kvio_batch *batch = list;
      list = batch->reclaim_next;
      atomic_store_explicit(&batch->refs, 1, memory_order_relaxed);
      kvio_batch_put(batch);
    }
  }
  return n;
}
