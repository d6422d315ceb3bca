/* SPDX-License-Identifier: Apache-2.0 */
#include "hist.h"

enum { LINEAR = 64, SUB_BITS = 5, SUB = 1 << SUB_BITS, FIRST_POWER = 6, LAST_POWER = 41 };

_Static_assert(LINEAR + (LAST_POWER - FIRST_POWER + 1) * SUB == KVIO_HIST_BUCKETS,
               "KVIO_HIST_BUCKETS does not match the bucket scheme");

static uint32_t bucket_of(uint64_t ns)
{
  if (ns < LINEAR)
    return (uint32_t)ns;
  uint32_t power = 63u - (uint32_t)__builtin_clzll(ns);
  if (power > LAST_POWER)
    return KVIO_HIST_BUCKETS - 1;
  uint32_t sub = (uint32_t)(ns >> (power - SUB_BITS)) & (SUB - 1);
  return LINEAR + (power - FIRST_POWER) * SUB + sub;
}

uint64_t kvio_hist_lower_ns(uint32_t i)
{
  if (i < LINEAR)
    return i;
  uint32_t power = FIRST_POWER + (i - LINEAR) / SUB;
  uint64_t sub = (i - LINEAR) % SUB;
  return (SUB + sub) << (power - SUB_BITS);
}

void kvio_hist_add(struct kvio_hist *hist, uint64_t ns)
{
  uint64_t count = kvio_counter_read(&hist->count);
  if (count == 0 || ns < kvio_counter_read(&hist->min_ns))
    atomic_store_explicit(&hist->min_ns, ns, memory_order_relaxed);
  if (ns > kvio_counter_read(&hist->max_ns))
    atomic_store_explicit(&hist->max_ns, ns, memory_order_relaxed);
  kvio_count(&hist->sum_ns, ns);
  double square = (double)ns * (double)ns;
  atomic_store_explicit(&hist->sum_squares,
                        atomic_load_explicit(&hist->sum_squares, memory_order_relaxed) + square,
                        memory_order_relaxed);
  kvio_count(&hist->buckets[bucket_of(ns)], 1);
  kvio_count(&hist->count, 1);
}

void kvio_hist_fold(const struct kvio_hist *hist, struct kvio_hist_snapshot *out)
{
  uint64_t count = kvio_counter_read(&hist->count);
  if (count == 0)
    return;
  uint64_t min_ns = kvio_counter_read(&hist->min_ns);
  if (out->count == 0 || min_ns < out->min_ns)
    out->min_ns = min_ns;
  out->max_ns = kvio_max_u64(out->max_ns, kvio_counter_read(&hist->max_ns));
  out->count += count;
  out->sum_ns += kvio_counter_read(&hist->sum_ns);
  out->sum_squares += atomic_load_explicit(&hist->sum_squares, memory_order_relaxed);
  for (uint32_t i = 0; i < KVIO_HIST_BUCKETS; i++)
    out->buckets[i] += kvio_counter_read(&hist->buckets[i]);
}

void kvio_io_fold(const struct kvio_io_counters *io, struct kvio_io_stats *out)
{
  out->ops += kvio_counter_read(&io->ops);
  out->bytes += kvio_counter_read(&io->bytes);
  out->errors += kvio_counter_read(&io->errors);
  kvio_hist_fold(&io->latency, &out->latency);
}
