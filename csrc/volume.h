/* SPDX-License-Identifier: Apache-2.0
 *
 * volume: N members as one. Opens and probes them, picks an engine for each, takes batches in and
 * closes without leaving the kernel a buffer that is gone. The public face is in kvio.h.
 *
 * States   OPEN -(kvio_volume_close)-> CLOSING -> CLOSED   everything in flight came back
 *                                              -> LEAKED   it did not: memory and descriptors are
 *                                                          kept
 *
 * Invariants
 *   V1  No member is written before all of them are open and checked; a failed open leaves nothing.
 *   V2  Two members never overlap.
 *   V3  After close() returned 0 no command is in flight and no thread of the volume runs.
 */
#ifndef KVIO_VOLUME_H
#define KVIO_VOLUME_H

#include "caller.h"
#include "iothreads.h"
#include "worker.h"

enum kvio_volume_state {
  KVIO_VOLUME_OPEN,
  KVIO_VOLUME_CLOSING,
  KVIO_VOLUME_CLOSED,
  KVIO_VOLUME_LEAKED,
};

struct kvio_volume {
  struct kvio_shared shared;
  struct kvio_callers *callers;
  struct kvio_iothreads *pool;
  pthread_mutex_t start_lock; /* starting workers; never per batch */
  _Atomic uint32_t workers_running;
  _Atomic int state;
  int uring_errno;
  uint32_t ring_flags;
  bool registered_files, registered_buffers;
  struct kvio_worker *workers[KVIO_MAX_MEMBERS];
};

/* Steps of kvio_volume_open, in volume_open.c. */
int kvio_volume_open_members(struct kvio_volume *vol, const struct kvio_volume_opts *opts,
                             struct kvio_error *err);
int kvio_volume_pick_engines(struct kvio_volume *vol, const struct kvio_volume_opts *opts,
                             struct kvio_error *err);

#endif
