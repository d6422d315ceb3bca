/* SPDX-License-Identifier: Apache-2.0
 *
 * base: what every layer may use: assertions, checked arithmetic, the clock, the error record,
 * and the mark that says "this process is a fork of the one that opened the engine".
 *
 * Invariants
 *   B1  A size or an offset that goes to a device is computed with the checked helpers or asserted.
 *   B2  The only process-wide mutable state of the C core is the fork generation (base.c).
 */
#ifndef KVIO_BASE_H
#define KVIO_BASE_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvio.h"

#define KVIO_LIKELY(x) __builtin_expect(!!(x), 1)
#define KVIO_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Always on: guards whatever computes a device offset or a length. Ours to get right, so abort. */
#define KVIO_ASSERT(cond)                                                                          \
  do {                                                                                             \
    if (KVIO_UNLIKELY(!(cond)))                                                                    \
      kvio_assert_fail(#cond, __FILE__, __LINE__);                                                 \
  } while (0)

#ifdef KVIO_DEBUG
#define KVIO_DEBUG_ASSERT(cond) KVIO_ASSERT(cond)
#else
#define KVIO_DEBUG_ASSERT(cond) ((void)0)
#endif

_Noreturn void kvio_assert_fail(const char *cond, const char *file, int line);

static inline uint64_t kvio_min_u64(uint64_t a, uint64_t b)
{
  return a < b ? a : b;
}

static inline uint64_t kvio_max_u64(uint64_t a, uint64_t b)
{
  return a > b ? a : b;
}

static inline bool kvio_is_pow2(uint64_t v)
{
  return v != 0 && (v & (v - 1)) == 0;
}

/* align must be a power of two */
static inline uint64_t kvio_align_down(uint64_t v, uint64_t align)
{
  return v & ~(align - 1);
}

static inline uint64_t kvio_align_up(uint64_t v, uint64_t align)
{
  return (v + align - 1) & ~(align - 1);
}

/* CLOCK_MONOTONIC in nanoseconds. */
uint64_t kvio_now_ns(void);

/* Fills *err (which may be NULL) with a formatted message and returns code (a negative errno). */
int kvio_error_set(struct kvio_error *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Grows by one in every child of a fork; an object remembers the value of its birth. */
uint32_t kvio_fork_generation(void);

#endif
