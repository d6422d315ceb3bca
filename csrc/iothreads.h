/* SPDX-License-Identifier: Apache-2.0
 *
 * iothreads: the engine for members whose I/O the kernel would hand to threads of its own anyway,
 * for machines that refuse io_uring, and for flush and discard: preadv2/pwritev2 in a pool.
 *
 * Invariants
 *   X1  A segment of a job is claimed once, under the pool's lock; whoever claims the last one
 *       unlinks the job first. So a job is never linked when its batch can be freed.
 *   X2  Read jobs are served before others, but after STREAK reads one other job gets a turn.
 *   X3  Threads are started on demand, up to io_threads, with all signals blocked.
 */
#ifndef KVIO_IOTHREADS_H
#define KVIO_IOTHREADS_H

#include "batch.h"

struct kvio_iothreads;

int kvio_iothreads_create(struct kvio_iothreads **out, struct kvio_shared *shared);

/* Offers batch->job to the pool. help: the caller will claim segments too. 0 or -errno when no
 * thread could be started at all; then nothing is queued. */
int kvio_iothreads_submit(struct kvio_iothreads *pool, struct kvio_batch *batch, bool help);

/* Works on the batch's job until all its segments are claimed. stat is the caller's. */
void kvio_iothreads_help(struct kvio_iothreads *pool, struct kvio_batch *batch,
                         struct kvio_stat_block *stat);

uint32_t kvio_iothreads_count(struct kvio_iothreads *pool);

/* Stops and joins the threads, waiting until `until` (CLOCK_MONOTONIC ns). False when one is still
 * inside the kernel: then the pool is leaked, since it still touches its memory. */
bool kvio_iothreads_stop(struct kvio_iothreads *pool, uint64_t until);
void kvio_iothreads_destroy(struct kvio_iothreads *pool);

/* Executes one segment in the calling thread. */
void kvio_seg_execute(struct kvio_seg *seg, struct kvio_stat_block *stat);

#endif
