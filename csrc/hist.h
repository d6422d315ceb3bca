/* SPDX-License-Identifier: Apache-2.0
 *
 * hist: a latency histogram and counters with one writer and any number of readers.
 * Buckets are log-linear: below 64 ns one a nanosecond, above that 32 to each power of two, so a
 * percentile is at most 1/32 too low; the last bucket takes everything from 2^42 ns (73 minutes).
 *
 * Invariant H1: only the owner of the block writes (relaxed load + store, no read-modify-write);
 * a reader may see one sample's count without its sum, never a torn number.
 */
#ifndef KVIO_HIST_H
#define KVIO_HIST_H

#include "base.h"

typedef _Atomic uint64_t kvio_counter;

static inline void kvio_count(kvio_counter *c, uint64_t n)
{
  atomic_store_explicit(c, atomic_load_explicit(c, memory_order_relaxed) + n, memory_order_relaxed);
}

static inline uint64_t kvio_counter_read(const kvio_counter *c)
{
  return atomic_load_explicit(c, memory_order_relaxed);
}

struct kvio_hist {
  kvio_counter count, min_ns, max_ns, sum_ns;
  _Atomic double sum_squares;
  kvio_counter buckets[KVIO_HIST_BUCKETS];
};

struct kvio_io_counters {
  kvio_counter ops, bytes, errors;
  struct kvio_hist latency;
};

void kvio_hist_add(struct kvio_hist *hist, uint64_t ns);

/* Adds hist to *out (which the caller zeroed before the first). */
void kvio_hist_fold(const struct kvio_hist *hist, struct kvio_hist_snapshot *out);
void kvio_io_fold(const struct kvio_io_counters *io, struct kvio_io_stats *out);

#endif
