/* SPDX-License-Identifier: Apache-2.0
 *
 * batch: the ops of one call, cut into segments (one command to one member each), and what became
 * of them. Knows how to cut, how to finish, whom to tell; does not know how a segment is executed.
 *
 * States of a batch (state word, also the futex that waiters sleep on)
 *   RUNNING -> FINISHING -> DONE       kvio_seg_complete: the last segment came back
 *   RUNNING -> EXPIRING  -> EXPIRED    kvio_batch_expire: deadline, interrupt, dead ring
 *
 * Invariants
 *   T1  seg->res goes from PENDING to its result or to ABANDONED once (compare-and-swap), so the
 *       caller's view of an expired batch never changes, and a late completion is told apart.
 *   T2  pending counts segments that are not complete; the engine holds one reference until it is
 *       zero. So memory and owner outlive every command that may still touch the buffers.
 *   T3  Results are read after the state is DONE or EXPIRED (acquire), or per segment (acquire).
 *   T4  A short transfer is never success: op result = bytes that are there without a gap.
 */
#ifndef KVIO_BATCH_H
#define KVIO_BATCH_H

#include "notify.h"
#include "shared.h"

enum kvio_batch_state {
  KVIO_BATCH_RUNNING,
  KVIO_BATCH_FINISHING,
  KVIO_BATCH_EXPIRING,
  KVIO_BATCH_DONE,
  KVIO_BATCH_EXPIRED,
};

#define KVIO_SEG_PENDING INT32_MIN
#define KVIO_SEG_ABANDONED (INT32_MIN + 1)

struct kvio_seg {
  struct kvio_seg *next; /* lane queue or shard list */
  struct kvio_batch *batch;
  uint64_t offset; /* bytes on the member */
  uint64_t length; /* bytes */
  uint64_t t_issue, t_done;
  union {
    void *addr;        /* n_iov == 1 */
    struct iovec *iov; /* n_iov > 1; private to the segment, advanced as data arrives */
  };
  uint32_t op;
  uint32_t done;       /* bytes transferred, a multiple of the member's alignment */
  uint32_t tail;       /* bytes beyond done that a short read brought */
  _Atomic int32_t res; /* PENDING, ABANDONED, 0 or -errno */
  uint16_t member;
  uint16_t n_iov;
  uint8_t opcode;
  uint8_t retries;
};

struct kvio_op_state {
  uint64_t offset; /* as asked */
  uint64_t asked;  /* bytes */
  uint64_t length; /* the same, clipped at the end of the volume */
  uint32_t first_seg, n_segs;
  uint32_t iov, n_iov; /* the caller's buffers, kept only for a bounced op */
  int32_t member;
  int32_t refused; /* -errno decided at the door, 0 = went out */
  uint32_t head;   /* bytes of the bounce buffer before the data */
  void *bounce;
};

/* Part of a batch that goes to one worker. */
struct kvio_shard {
  struct kvio_shard *next; /* inbox of the worker */
  struct kvio_shard *prev_active, *next_active;
  struct kvio_batch *batch;
  struct kvio_seg *segs;
  bool runs_job; /* this worker hands the batch's segments for the I/O threads to them */
};

struct kvio_batch {
  struct kvio_shared *shared;
  struct kvio_batch *reclaim_next;
  _Atomic(void *) owner;
  _Atomic uint32_t state;
  _Atomic uint32_t waiters;
  _Atomic uint32_t refs;
  _Atomic uint32_t pending;
  _Atomic int event_fd;                     /* -1 = nobody asked */
  _Atomic(struct kvio_notifier *) notifier; /* see notify.h */
  struct kvio_batch *notify_next;
  uint64_t notify_tag;
  _Atomic bool notify_used;
  int expire_code;
  enum kvio_opcode opcode;
  uint32_t n_ops, n_segs, n_ring_segs;
  uint64_t t_start;
  uint64_t deadline; /* absolute, 0 = none */
  size_t block_bytes;
  struct kvio_op_state *ops;
  struct kvio_seg *segs;
  struct iovec *iovs;
  struct kvio_seg *job; /* segments for the I/O threads, linked by next */
  uint32_t n_job;
  struct kvio_shard shards[]; /* n_workers */
};

/* Cuts ops into segments. Refuses bad ones (-EINVAL, -EBADF) with *err and nothing started. */
int kvio_batch_create(struct kvio_batch **out, struct kvio_shared *shared, enum kvio_opcode opcode,
                      const struct kvio_op *ops, uint32_t n_ops, uint64_t deadline_ns, void *owner,
                      struct kvio_error *err);

/* Marks the batch as under way: from here every segment must be completed. */
void kvio_batch_start(struct kvio_batch *batch);

static inline void kvio_batch_ref(struct kvio_batch *batch)
{
  atomic_fetch_add_explicit(&batch->refs, 1, memory_order_relaxed);
}

static inline bool kvio_batch_running(const struct kvio_batch *batch)
{
  return atomic_load_explicit(&batch->state, memory_order_acquire) == KVIO_BATCH_RUNNING;
}

/* One segment is over: code 0 or -errno; stat belongs to the calling thread. */
void kvio_seg_complete(struct kvio_seg *seg, int code, uint64_t now, struct kvio_stat_block *stat);

/* Ends a running batch early: unfinished ops get code. The segments stay in quarantine until they
 * complete. False when the batch was finished already. */
bool kvio_batch_expire(struct kvio_batch *batch, int code);

enum kvio_transfer { KVIO_TRANSFER_DONE, KVIO_TRANSFER_MORE, KVIO_TRANSFER_RETRY };

/* What a command's result (bytes or -errno) means for its segment: over (*code), the rest is still
 * to come, or try again. */
enum kvio_transfer kvio_seg_advance(struct kvio_seg *seg, int64_t result, int *code,
                                    struct kvio_stat_block *stat);

/* The unfinished part of a segment. */
static inline uint64_t kvio_seg_offset(const struct kvio_seg *seg)
{
  return seg->offset + seg->done;
}

static inline uint32_t kvio_seg_left(const struct kvio_seg *seg)
{
  return (uint32_t)(seg->length - seg->done);
}

/* See kvio_volume_reclaim(). */
uint32_t kvio_shared_reclaim(struct kvio_shared *shared, void **owners, uint32_t max);

#endif
