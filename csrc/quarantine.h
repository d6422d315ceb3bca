/* SPDX-License-Identifier: Apache-2.0
 *
 * quarantine: the commands of rings that were given up while the kernel still worked on them. The
 * ring tells through a descriptor when the last of them is over (R4 in ring.h); until then their
 * batches, and so the buffers, are kept.
 *
 * Invariants
 *   Q1  The batches of these commands have expired: their results do not change any more.
 *   Q2  A command is completed once, by whoever sees the end of its ring first, under the lock.
 */
#ifndef KVIO_QUARANTINE_H
#define KVIO_QUARANTINE_H

#include "batch.h"

struct kvio_remains {
  struct kvio_remains *next;
  struct kvio_seg *segs; /* linked by next */
  uint32_t n;
  int end_fd; /* owned */
};

/* Takes over *remains, which malloc() made. */
void kvio_quarantine_add(struct kvio_shared *shared, struct kvio_remains *remains);

/* A ring without commands that the kernel has not let go of yet, for kvio_quarantine_settle(). */
void kvio_quarantine_empty(struct kvio_shared *shared, int end_fd);

/* Lets go of what the kernel is done with; never blocks. Returns the number of commands left. */
uint32_t kvio_quarantine_sweep(struct kvio_shared *shared);

/* Waits until `until` (CLOCK_MONOTONIC ns) for the end of every ring, then forgets the empty ones. */
void kvio_quarantine_settle(struct kvio_shared *shared, uint64_t until);

static inline bool kvio_quarantine_any(const struct kvio_shared *shared)
{
  return atomic_load_explicit(&shared->n_remains, memory_order_relaxed) != 0;
}

#endif
