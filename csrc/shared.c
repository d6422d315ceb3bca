/* SPDX-License-Identifier: Apache-2.0 */
#include "shared.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static struct kvio_stat_block *new_block(uint32_t n_members)
{
  return calloc(1,
                sizeof(struct kvio_stat_block) + n_members * sizeof(struct kvio_member_counters));
}

int kvio_shared_init(struct kvio_shared *shared, uint32_t n_members)
{
  memset(shared, 0, sizeof(*shared));
  shared->n_members = n_members;
  shared->fork_generation = kvio_fork_generation();
  shared->members = calloc(n_members, sizeof(*shared->members));
  shared->retired = new_block(n_members);
  if (!shared->members || !shared->retired) {
    free(shared->members);
    free(shared->retired);
    return -ENOMEM;
  }
  for (uint32_t i = 0; i < n_members; i++)
    shared->members[i].dev.fd = -1;
  kvio_registry_init(&shared->registry);
  pthread_mutex_init(&shared->stats_lock, NULL);
  pthread_mutex_init(&shared->quarantine_lock, NULL);
  return 0;
}

void kvio_shared_destroy(struct kvio_shared *shared)
{
  for (int i = 0; i < KVIO_EVENT_POOL; i++)
    if (shared->events[i] > 0)
      close(shared->events[i]);
  for (int i = 0; i < KVIO_BLOCK_POOL; i++)
    free(atomic_load_explicit(&shared->blocks[i], memory_order_relaxed));
  while (shared->stats) {
    struct kvio_stat_block *block = shared->stats;
    shared->stats = block->next;
    free(block);
  }
  free(shared->retired);
  free(shared->members);
  kvio_layout_free(&shared->layout);
  kvio_registry_destroy(&shared->registry);
  pthread_mutex_destroy(&shared->stats_lock);
  pthread_mutex_destroy(&shared->quarantine_lock);
}

struct kvio_stat_block *kvio_stats_acquire(struct kvio_shared *shared)
{
  struct kvio_stat_block *block = new_block(shared->n_members);
  if (!block)
    return NULL;
  pthread_mutex_lock(&shared->stats_lock);
  block->next = shared->stats;
  shared->stats = block;
  pthread_mutex_unlock(&shared->stats_lock);
  return block;
}

static void merge_counter(kvio_counter *to, const kvio_counter *from)
{
  kvio_count(to, kvio_counter_read(from));
}

static void merge_io(struct kvio_io_counters *to, const struct kvio_io_counters *from)
{
  merge_counter(&to->ops, &from->ops);
  merge_counter(&to->bytes, &from->bytes);
  merge_counter(&to->errors, &from->errors);
  uint64_t count = kvio_counter_read(&from->latency.count);
  if (count == 0)
    return;
  uint64_t min_ns = kvio_counter_read(&from->latency.min_ns);
  if (kvio_counter_read(&to->latency.count) == 0 || min_ns < kvio_counter_read(&to->latency.min_ns))
    atomic_store_explicit(&to->latency.min_ns, min_ns, memory_order_relaxed);
  uint64_t max_ns = kvio_counter_read(&from->latency.max_ns);
  if (max_ns > kvio_counter_read(&to->latency.max_ns))
    atomic_store_explicit(&to->latency.max_ns, max_ns, memory_order_relaxed);
  merge_counter(&to->latency.count, &from->latency.count);
  merge_counter(&to->latency.sum_ns, &from->latency.sum_ns);
  atomic_store_explicit(&to->latency.sum_squares,
                        to->latency.sum_squares + from->latency.sum_squares, memory_order_relaxed);
  for (uint32_t i = 0; i < KVIO_HIST_BUCKETS; i++)
    merge_counter(&to->latency.buckets[i], &from->latency.buckets[i]);
}

void kvio_stats_release(struct kvio_shared *shared, struct kvio_stat_block *block)
{
  pthread_mutex_lock(&shared->stats_lock);
  struct kvio_stat_block **link = &shared->stats;
  while (*link != block)
    link = &(*link)->next;
  *link = block->next;
  struct kvio_stat_block *to = shared->retired;
  for (int d = 0; d < 2; d++)
    merge_io(&to->op[d], &block->op[d]);
  merge_counter(&to->retries, &block->retries);
  merge_counter(&to->short_reads, &block->short_reads);
  merge_counter(&to->bounced, &block->bounced);
  merge_counter(&to->fixed_ops, &block->fixed_ops);
  merge_counter(&to->unfixed_ops, &block->unfixed_ops);
  merge_counter(&to->direct_ops, &block->direct_ops);
  merge_counter(&to->stale_completions, &block->stale_completions);
  merge_counter(&to->poisoned_rings, &block->poisoned_rings);
  for (uint32_t m = 0; m < shared->n_members; m++) {
    for (int d = 0; d < 2; d++)
      merge_io(&to->member[m].io[d], &block->member[m].io[d]);
    merge_counter(&to->member[m].retries, &block->member[m].retries);
  }
  pthread_mutex_unlock(&shared->stats_lock);
  free(block);
}

struct kvio_stat_block *kvio_stats_orphans(struct kvio_shared *shared)
{
  pthread_mutex_lock(&shared->stats_lock);
  return shared->retired;
}

void kvio_stats_orphans_done(struct kvio_shared *shared)
{
  pthread_mutex_unlock(&shared->stats_lock);
}

void kvio_stats_reset(struct kvio_shared *shared)
{
  size_t bytes = shared->n_members * sizeof(struct kvio_member_counters);
  pthread_mutex_lock(&shared->stats_lock);
  for (struct kvio_stat_block *block = shared->stats; block; block = block->next) {
    struct kvio_stat_block *next = block->next;
    memset(block, 0, sizeof(*block) + bytes);
    block->next = next;
  }
  pthread_mutex_unlock(&shared->stats_lock);
}

int kvio_event_acquire(struct kvio_shared *shared)
{
  for (int i = 0; i < KVIO_EVENT_POOL; i++) {
    /* acq_rel: whoever takes the descriptor sees the drain of whoever put it here */
    int fd = atomic_exchange_explicit(&shared->events[i], 0, memory_order_acq_rel);
    if (fd > 0)
      return fd;
  }
  int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return fd < 0 ? -errno : fd;
}

void kvio_event_signal(int fd)
{
  uint64_t one = 1;
  while (write(fd, &one, sizeof(one)) < 0 && errno == EINTR)
    ;
}

void kvio_event_release(struct kvio_shared *shared, int fd)
{
  uint64_t value;
  while (read(fd, &value, sizeof(value)) < 0 && errno == EINTR)
    ;
  for (int i = 0; i < KVIO_EVENT_POOL && fd > 0; i++) {
    int empty = 0;
    if (atomic_compare_exchange_strong_explicit(&shared->events[i], &empty, fd,
                                                memory_order_acq_rel, memory_order_relaxed))
      return;
  }
  close(fd);
}
