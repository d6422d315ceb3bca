/* SPDX-License-Identifier: Apache-2.0
 *
 * lane: one ring, its request slots and its queues: executes the ring segments of batches. A lane
 * belongs to one thread, a worker or a caller that blocks.
 *
 * A segment's way:  queued in its member's queue -(issue)-> in a slot, in flight -(reap)->
 *                   complete | queued again (short transfer, EAGAIN, ENOMEM)
 *
 * Invariants
 *   A1  A token is slot number + generation; the generation moves when a slot is freed, so a
 *       completion that does not match is dropped and counted, never credited to another segment.
 *   A2  In flight <= slots <= completion queue entries.
 *   A3  Per member at most queue_depth in flight; per lane at most max_inflight and
 *       max_inflight_bytes (one segment is always let through).
 *   A4  Reads go first. While reads are under way anywhere in the volume a lane keeps at most a
 *       quarter of its slots for writes; after STREAK reads one waiting write goes, so neither
 *       starves.
 *   A5  After a submit that failed for good every segment the kernel did not take fails; if the ring
 *       cannot be entered at all any more the lane is dead: what is in flight expires, and its
 *       ring is given up (quarantine.h).
 */
#ifndef KVIO_LANE_H
#define KVIO_LANE_H

#include "quarantine.h"

struct kvio_lane;

/* A lane without a ring: slots and statistics. 0 or -ENOMEM. */
int kvio_lane_create(struct kvio_lane **out, struct kvio_shared *shared);
/* Gives it a ring. own_thread: kvio_lane_enable() follows, in the thread that will use it and that
 * ends with the lane. */
int kvio_lane_open_ring(struct kvio_lane *lane, bool own_thread);
int kvio_lane_enable(struct kvio_lane *lane);
/* Nothing may be in flight. The ring's own thread lets the members go at once by closing it. */
void kvio_lane_close_ring(struct kvio_lane *lane);
void kvio_lane_destroy(struct kvio_lane *lane);

/* Gives up the ring with the commands in flight, whose batches have expired, from any thread when
 * the owner is not inside; what is queued is cancelled. The lane can get another ring. -errno where
 * the ring must be kept: then its owner has to reap it. */
int kvio_lane_retire(struct kvio_lane *lane);

/* Gives up the lane (A5): batches in flight expire with code, what is queued fails, and so does
 * whatever comes later. */
void kvio_lane_abandon(struct kvio_lane *lane, int code);
bool kvio_lane_dead(const struct kvio_lane *lane);

struct kvio_stat_block *kvio_lane_stat(struct kvio_lane *lane);
struct kvio_ring *kvio_lane_ring(struct kvio_lane *lane);
uint32_t kvio_lane_in_flight(const struct kvio_lane *lane);
uint32_t kvio_lane_queued(const struct kvio_lane *lane);

/* Queues a list of segments (linked by next). */
void kvio_lane_enqueue(struct kvio_lane *lane, struct kvio_seg *list);

/* An eventfd whose signals end a step's wait. */
void kvio_lane_watch(struct kvio_lane *lane, int event_fd);

/* Issues what the caps allow, waits for wait_nr completions (0 = does not block) for at most
 * timeout_ns, completes segments. 0, -ETIME, -EINTR, or the -errno that poisoned the ring. */
int kvio_lane_step(struct kvio_lane *lane, uint32_t wait_nr, uint64_t timeout_ns);

/* Completions that a worker with much in flight may wait for together, and for how long: entering
 * the kernel for each of them costs more than they do. False: it waits for one. What the worker is
 * given meanwhile waits as long, so this is a small part of what an operation takes just now. */
bool kvio_lane_group(const struct kvio_lane *lane, uint32_t *wait_nr, uint64_t *timeout_ns);

/* Runs until the batch has no ring segment left. -EINTR when interrupt says so. */
int kvio_lane_run(struct kvio_lane *lane, struct kvio_batch *batch, uint32_t n_segs,
                  kvio_interrupt_fn interrupt, void *interrupt_arg);

#endif
