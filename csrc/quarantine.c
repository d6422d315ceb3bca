/* SPDX-License-Identifier: Apache-2.0 */
#include "quarantine.h"

#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

void kvio_quarantine_add(struct kvio_shared *shared, struct kvio_remains *remains)
{
  struct kvio_stat_block *stat = kvio_stats_orphans(shared);
  for (struct kvio_seg *seg = remains->segs; seg; seg = seg->next)
    atomic_fetch_add_explicit(&stat->member[seg->member].in_flight, 1, memory_order_relaxed);
  kvio_stats_orphans_done(shared);
  pthread_mutex_lock(&shared->quarantine_lock);
  remains->next = shared->remains;
  shared->remains = remains;
  atomic_fetch_add_explicit(&shared->n_remains, 1, memory_order_relaxed);
  pthread_mutex_unlock(&shared->quarantine_lock);
}

void kvio_quarantine_empty(struct kvio_shared *shared, int end_fd)
{
  struct kvio_remains *remains = calloc(1, sizeof(*remains));
  if (!remains) {
    close(end_fd); /* nobody will wait for it, that is all */
    return;
  }
  remains->end_fd = end_fd;
  kvio_quarantine_add(shared, remains);
}

static bool ended(const struct kvio_remains *remains, int timeout_ms)
{
  struct pollfd pfd = {.fd = remains->end_fd, .events = POLLIN};
  return poll(&pfd, 1, timeout_ms) == 1;
}

static void let_go(struct kvio_shared *shared, struct kvio_remains *remains)
{
  uint64_t now = kvio_now_ns();
  struct kvio_stat_block *stat = kvio_stats_orphans(shared);
  for (struct kvio_seg *seg = remains->segs, *next; seg; seg = next) {
    next = seg->next; /* the batch may go with its last segment */
    atomic_fetch_sub_explicit(&stat->member[seg->member].in_flight, 1, memory_order_relaxed);
    kvio_seg_complete(seg, -ECANCELED, now, stat);
  }
  kvio_stats_orphans_done(shared);
  close(remains->end_fd);
  free(remains);
}

/* Lets go of the rings that end until `until`; forget: and of the empty ones, ended or not. Returns
 * the number of commands left. */
static uint32_t walk(struct kvio_shared *shared, uint64_t until, bool forget)
{
  uint32_t left = 0;
  pthread_mutex_lock(&shared->quarantine_lock);
  struct kvio_remains **link = &shared->remains;
  while (*link) {
    struct kvio_remains *remains = *link;
    uint64_t now = until ? kvio_now_ns() : 0;
    bool over = ended(remains, until > now ? (int)((until - now) / 1000000u + 1) : 0);
    if (!over && !(forget && remains->n == 0)) {
      left += remains->n;
      link = &remains->next;
      continue;
    }
    *link = remains->next;
    atomic_fetch_sub_explicit(&shared->n_remains, 1, memory_order_relaxed);
    let_go(shared, remains);
  }
  pthread_mutex_unlock(&shared->quarantine_lock);
  return left;
}

uint32_t kvio_quarantine_sweep(struct kvio_shared *shared)
{
  return kvio_quarantine_any(shared) ? walk(shared, 0, false) : 0;
}

void kvio_quarantine_settle(struct kvio_shared *shared, uint64_t until)
{
  walk(shared, until, true);
}
