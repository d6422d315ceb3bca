/* SPDX-License-Identifier: Apache-2.0
 *
 * worker: a native thread with a lane of its own. Executes submitted batches, keeps their
 * deadlines. Member i belongs to worker i mod n_workers.
 *
 * Invariants
 *   W1  The inbox is a lock-free stack that many push to and only the worker takes, whole.
 *   W2  sleeping is set before the inbox is looked at for the last time; a sender pushes before it
 *       looks at sleeping (seq_cst both), so a shard is never left lying beside a sleeping worker.
 *       A worker that waits for a group (kvio_lane_group) is not sleeping: it looks soon by itself.
 *   W3  A shard with a deadline is in the active list and holds a reference to its batch until the
 *       batch is no longer running.
 */
#ifndef KVIO_WORKER_H
#define KVIO_WORKER_H

#include "iothreads.h"
#include "lane.h"

struct kvio_worker;

/* Starts the thread; 0 or -errno. */
int kvio_worker_start(struct kvio_worker **out, struct kvio_shared *shared,
                      struct kvio_iothreads *pool);

/* Hands over the shard of a started batch. The worker's reference is taken here. */
void kvio_worker_push(struct kvio_worker *worker, struct kvio_shard *shard);

/* Asks the worker to end once it has nothing in flight, or at `until` (CLOCK_MONOTONIC ns). */
void kvio_worker_stop(struct kvio_worker *worker, uint64_t until);

/* Waits for its end until `until`. 0 = ended clean; else commands are still in flight, or the thread
 * itself is stuck in the kernel (UINT32_MAX): then the worker must be leaked. */
uint32_t kvio_worker_join(struct kvio_worker *worker, uint64_t until);
void kvio_worker_destroy(struct kvio_worker *worker);

#endif
