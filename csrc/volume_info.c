/* SPDX-License-Identifier: Apache-2.0
 *
 * What a volume tells about itself: capabilities and statistics.
 */
#include <string.h>

#include "volume.h"

void kvio_volume_info(const struct kvio_volume *vol, struct kvio_volume_info *info)
{
  const struct kvio_shared *shared = &vol->shared;
  *info = (struct kvio_volume_info){
      .size_bytes = shared->layout.size_bytes,
      .stripe_unit = shared->layout.stripe_unit,
      .n_members = shared->n_members,
      .read_align = shared->read_align,
      .write_align = shared->write_align,
      .mem_align = shared->mem_align,
      .queue_depth = shared->queue_depth,
      .max_inflight = shared->max_inflight,
      .workers = shared->n_workers,
      .io_threads = shared->io_threads,
      .write = shared->write,
      .uring = shared->uring_granted,
      .uring_errno = -vol->uring_errno,
      .ring_flags = vol->ring_flags,
      .registered_files = vol->registered_files,
      .registered_buffers = vol->registered_buffers,
      .register_errno = atomic_load(&shared->registry.last_errno),
      .regions = shared->registry.n_regions,
  };
}

int kvio_volume_member(const struct kvio_volume *vol, uint32_t index, struct kvio_member_info *info)
{
  if (index >= vol->shared.n_members)
    return -EINVAL;
  const struct kvio_member *member = &vol->shared.members[index];
  const struct kvio_device *dev = &member->dev;
  *info = (struct kvio_member_info){
      .path = dev->path,
      .identity = dev->identity,
      .engine_reason = member->reason,
      .engine = member->engine,
      .size_bytes = dev->size_bytes,
      .logical_block = dev->logical_block,
      .physical_block = dev->physical_block,
      .mem_align = dev->mem_align,
      .offset_align = dev->offset_align,
      .write_align = dev->write_align,
      .max_io_bytes = member->chunk_bytes,
      .max_io_bytes_small_pages = member->small_chunk,
      .overridden = member->dev.destroys ? member->dev.destroys : "",
      .direct = dev->direct,
      .nowait_read = dev->nowait_read,
      .volatile_cache = dev->volatile_cache,
      .can_discard = dev->can_discard,
      .sparse = dev->sparse,
  };
  return 0;
}

static void fold_block(const struct kvio_stat_block *block, struct kvio_volume_stats *out)
{
  for (int d = 0; d < 2; d++)
    kvio_io_fold(&block->op[d], &out->io[d]);
  out->retries += kvio_counter_read(&block->retries);
  out->short_reads += kvio_counter_read(&block->short_reads);
  out->bounced += kvio_counter_read(&block->bounced);
  out->fixed_ops += kvio_counter_read(&block->fixed_ops);
  out->unfixed_ops += kvio_counter_read(&block->unfixed_ops);
  out->direct_ops += kvio_counter_read(&block->direct_ops);
  out->stale_completions += kvio_counter_read(&block->stale_completions);
  out->poisoned_rings += kvio_counter_read(&block->poisoned_rings);
}

static uint64_t never_negative(const _Atomic int64_t *counter)
{
  int64_t value = atomic_load(counter);
  return value > 0 ? (uint64_t)value : 0;
}

int kvio_volume_stats(struct kvio_volume *vol, struct kvio_volume_stats *out)
{
  struct kvio_shared *shared = &vol->shared;
  memset(out, 0, sizeof(*out));
  if (kvio_shared_forked(shared))
    return -EPERM;
  kvio_quarantine_sweep(shared);
  pthread_mutex_lock(&shared->stats_lock);
  shared->retired->next = shared->stats;
  for (const struct kvio_stat_block *block = shared->retired; block; block = block->next)
    fold_block(block, out);
  pthread_mutex_unlock(&shared->stats_lock);
  for (int d = 0; d < 2; d++) {
    out->io[d].ops += atomic_load(&shared->loose[d].ops);
    out->io[d].bytes += atomic_load(&shared->loose[d].bytes);
    out->io[d].errors += atomic_load(&shared->loose[d].errors);
  }
  out->deadline_exceeded = atomic_load(&shared->deadline_exceeded);
  out->quarantined_buffers = never_negative(&shared->quarantined_buffers);
  out->quarantined_bytes = never_negative(&shared->quarantined_bytes);
  if (atomic_load(&vol->state) != KVIO_VOLUME_OPEN)
    return 0;
  out->lanes = kvio_callers_count(vol->callers);
  out->workers = atomic_load(&vol->workers_running);
  out->io_threads = kvio_iothreads_count(vol->pool);
  return 0;
}

int kvio_volume_member_stats(struct kvio_volume *vol, uint32_t index, struct kvio_member_stats *out)
{
  struct kvio_shared *shared = &vol->shared;
  memset(out, 0, sizeof(*out));
  if (index >= shared->n_members)
    return -EINVAL;
  if (kvio_shared_forked(shared))
    return -EPERM;
  int64_t in_flight = 0;
  pthread_mutex_lock(&shared->stats_lock);
  shared->retired->next = shared->stats;
  for (const struct kvio_stat_block *block = shared->retired; block; block = block->next) {
    const struct kvio_member_counters *member = &block->member[index];
    for (int d = 0; d < 2; d++)
      kvio_io_fold(&member->io[d], &out->io[d]);
    out->retries += kvio_counter_read(&member->retries);
    in_flight += atomic_load_explicit(&member->in_flight, memory_order_relaxed);
  }
  pthread_mutex_unlock(&shared->stats_lock);
  out->in_flight = in_flight > 0 ? (uint64_t)in_flight : 0;
  out->flushes = atomic_load(&shared->members[index].flushes);
  out->discards = atomic_load(&shared->members[index].discards);
  out->deadline_strikes = atomic_load(&shared->members[index].strikes);
  return 0;
}
