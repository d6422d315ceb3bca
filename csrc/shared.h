/* SPDX-License-Identifier: Apache-2.0
 *
 * shared: what every lane, worker and I/O thread of one volume sees: the members, the limits, and
 * the few counters that are written from several threads. Written once at open, then read-only but
 * for the atomics.
 *
 * Invariants
 *   S1  An owner is pushed to reclaim exactly once, when the last reference to its batch is gone.
 */
#ifndef KVIO_SHARED_H
#define KVIO_SHARED_H

#include "bufpool.h"
#include "device.h"
#include "hist.h"
#include "layout.h"

#define KVIO_EVENT_POOL 64
#define KVIO_BLOCK_POOL 64
#define KVIO_STRIKES_SUSPECT 3

struct kvio_member {
  struct kvio_device dev;
  enum kvio_engine engine; /* never AUTO after open */
  char reason[160];
  uint32_t chunk_bytes;     /* largest single command, a power of two */
  uint32_t small_chunk;     /* the same for memory that is not known to lie in huge pages */
  _Atomic uint32_t strikes; /* deadlines passed since the last success */
  _Atomic int flush_errno;  /* a flush that failed: what it covered is unknown for ever */
  _Atomic uint64_t flushes, discards;
};

/* Statistics of one writer: a lane or an I/O thread (H1). */
struct kvio_stat_block {
  struct kvio_stat_block *next; /* list in kvio_shared, under stats_lock */
  struct kvio_io_counters op[2];
  kvio_counter retries, short_reads, bounced, fixed_ops, unfixed_ops, direct_ops;
  kvio_counter stale_completions, poisoned_rings;
  struct kvio_member_counters {
    struct kvio_io_counters io[2];
    kvio_counter retries;
    _Atomic int64_t in_flight;
  } member[]; /* n_members */
};

struct kvio_block; /* memory of a batch, see batch.c */

struct kvio_shared {
  struct kvio_layout layout;
  struct kvio_member *members;
  uint32_t n_members;
  bool write;
  bool iopoll, sqpoll, passthrough;
  bool uring_granted;
  enum kvio_unaligned unaligned;
  uint32_t read_align, write_align, mem_align; /* maxima over the members, powers of two */
  uint32_t queue_depth, max_inflight, submit_batch;
  uint32_t n_workers, io_threads;
  uint64_t max_inflight_bytes;
  uint64_t smallest_cut; /* min(stripe unit, smallest chunk of any member) */
  uint64_t deadline_ns;
  uint32_t fork_generation;

  struct kvio_registry registry;
  _Atomic uint32_t active_reads;  /* read batches under way: writers leave room (see lane.c) */
  _Atomic uint32_t active_others; /* and all other batches */
  _Atomic uint64_t deadline_exceeded;
  _Atomic int64_t quarantined_buffers, quarantined_bytes;

  _Atomic(struct kvio_batch *) reclaim; /* finished batches whose owner nobody has taken */
  _Atomic int events[KVIO_EVENT_POOL];  /* idle eventfds; 0 = empty place */
  _Atomic(void *) blocks[KVIO_BLOCK_POOL];

  pthread_mutex_t quarantine_lock; /* remains: when a ring is given up, and to look for its end */
  struct kvio_remains *remains;    /* see quarantine.h */
  _Atomic uint32_t n_remains;

  /* stats, retired: taken when a lane is born or dies, by stats(), and for orphans. */
  pthread_mutex_t stats_lock;
  struct kvio_stat_block *stats;
  struct kvio_stat_block *retired; /* statistics of lanes that are gone; one block */
  /* Operations that no lane saw to their end: expired ones, and those beyond the volume's end. */
  struct kvio_loose_counters {
    _Atomic uint64_t ops, bytes, errors;
  } loose[2];
};

/* True in a child of the process that opened the volume: rings, threads and locks are not its. */
static inline bool kvio_shared_forked(const struct kvio_shared *shared)
{
  return shared->fork_generation != kvio_fork_generation();
}

int kvio_shared_init(struct kvio_shared *shared, uint32_t n_members);
void kvio_shared_destroy(struct kvio_shared *shared);

/* A block of statistics, linked into the list; NULL when memory is short. */
struct kvio_stat_block *kvio_stats_acquire(struct kvio_shared *shared);
/* Folds the block into `retired` and frees it. */
void kvio_stats_release(struct kvio_shared *shared, struct kvio_stat_block *block);
/* The block for segments that no lane or thread owns any more, locked until _done. */
struct kvio_stat_block *kvio_stats_orphans(struct kvio_shared *shared);
void kvio_stats_orphans_done(struct kvio_shared *shared);
/* Forgets what was counted so far: the probing reads of open(), before anybody else looks. */
void kvio_stats_reset(struct kvio_shared *shared);

/* An eventfd (non-blocking, close-on-exec) from the pool, or -errno. */
int kvio_event_acquire(struct kvio_shared *shared);
void kvio_event_release(struct kvio_shared *shared, int fd);
/* Makes an eventfd readable. */
void kvio_event_signal(int fd);

#endif
