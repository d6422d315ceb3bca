/* SPDX-License-Identifier: Apache-2.0
 *
 * caller: what a volume keeps for each thread that calls it: a lane for blocking calls and the mark
 * "this thread is inside". Found through a thread-local list, so callers share no lock.
 *
 * Invariants
 *   C1  An entry lives as long as its thread or its volume refers to it (two references); a list
 *       lives as long as any entry of it. So a thread-local pointer never dangles.
 *   C2  busy is set before closing is read, closing is set before busy is read (seq_cst on both
 *       sides, so at least one of them sees the other).
 *   C3  A lane is used by its thread only, but for close(), which gives up the ring of a lane that
 *       was left with I/O in flight, when nobody is inside.
 *   C4  A thread can be inside twice: a signal handler of the language above runs in the middle of
 *       a blocked call. The lane belongs to the outer call (depth 1).
 */
#ifndef KVIO_CALLER_H
#define KVIO_CALLER_H

#include "lane.h"

struct kvio_callers; /* the list of one volume */

struct kvio_caller {
  struct kvio_callers *list;
  struct kvio_caller *prev, *next; /* in the list, under its lock */
  struct kvio_caller *tls_next;
  struct kvio_lane *lane;
  _Atomic uint32_t refs;
  _Atomic bool busy;
  uint32_t depth; /* calls of this thread that are inside; only the thread looks */
};

int kvio_callers_create(struct kvio_callers **out, struct kvio_shared *shared);

/* The calling thread's entry, made on the first call; -ENOMEM. */
int kvio_caller_get(struct kvio_callers *list, struct kvio_caller **out);

/* Marks the thread as inside (once more); -ESHUTDOWN when the volume is closing. */
int kvio_caller_enter(struct kvio_caller *caller);
void kvio_caller_leave(struct kvio_caller *caller);

/* Is the calling thread inside a call of this volume? */
bool kvio_callers_inside(const struct kvio_callers *list);

/* From here kvio_caller_enter() refuses. */
void kvio_callers_close(struct kvio_callers *list);

/* Part of close(): waits until `until` for every thread to leave and every lane to be empty. Returns
 * the commands and threads that are left; 0 = all lanes are destroyed. */
uint32_t kvio_callers_drain(struct kvio_callers *list, uint64_t until);
uint32_t kvio_callers_count(struct kvio_callers *list);
void kvio_callers_release(struct kvio_callers *list);

#endif
