/* SPDX-License-Identifier: Apache-2.0
 *
 * iothreads: the engine for members whose I/O the kernel would hand to threads of its own anyway,
 * for machines that refuse io_uring, and for flush and discard: preadv2/pwritev2 in a pool.
 *
 * Invariants
 *   X1  A segment is taken from its member's queue once, under the pool's lock; a thread refers to
 *       the batches of what it took until it is done.
 *   X2  Reads are served before others, but after STREAK reads something else gets a turn.
 *   X3  Threads are started on demand, up to io_threads, with all signals blocked.
 *   X4  Half the threads are dealt out to the members (at least one each), the other half serves
 *       whoever comes: members that hang take the common half and their own share, and the others
 *       still have theirs. With more members than threads there is a limit to that.
 */
#ifndef KVIO_IOTHREADS_H
#define KVIO_IOTHREADS_H

#include "batch.h"

struct kvio_iothreads;

int kvio_iothreads_create(struct kvio_iothreads **out, struct kvio_shared *shared);

/* Gives batch->job to the pool. -errno when no thread could be started at all; then nothing is
 * queued. */
int kvio_iothreads_submit(struct kvio_iothreads *pool, struct kvio_batch *batch);

uint32_t kvio_iothreads_count(struct kvio_iothreads *pool);

/* Stops and joins the threads, waiting until `until` (CLOCK_MONOTONIC ns). False when one is still
 * inside the kernel: then the pool is leaked, since it still touches its memory. */
bool kvio_iothreads_stop(struct kvio_iothreads *pool, uint64_t until);
void kvio_iothreads_destroy(struct kvio_iothreads *pool);

/* Executes one segment in the calling thread. */
void kvio_seg_execute(struct kvio_seg *seg, struct kvio_stat_block *stat);

#endif
