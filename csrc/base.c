/* SPDX-License-Identifier: Apache-2.0 */
#include "base.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

void kvio_assert_fail(const char *cond, const char *file, int line)
{
  fprintf(stderr, "kvio: assertion failed: %s (%s:%d). This is a bug in kvio.\n", cond, file, line);
  abort();
}

uint64_t kvio_now_ns(void)
{
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

int kvio_error_set(struct kvio_error *err, int code, const char *fmt, ...)
{
  if (err) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->message, sizeof(err->message), fmt, ap);
    va_end(ap);
    err->code = code;
  }
  return code;
}

/* Relaxed is enough: a child has one thread, and it inherits memory as the fork saw it. */
static _Atomic uint32_t fork_generation;

static void count_fork(void)
{
  atomic_fetch_add_explicit(&fork_generation, 1, memory_order_relaxed);
}

__attribute__((constructor)) static void watch_forks(void)
{
  pthread_atfork(NULL, NULL, count_fork);
}

uint32_t kvio_fork_generation(void)
{
  return atomic_load_explicit(&fork_generation, memory_order_relaxed);
}

enum kvio_error_class kvio_error_classify(int code)
{
  switch (code < 0 ? -code : code) {
  case 0:
    return KVIO_CLASS_NONE;
  case ENODATA:
    return KVIO_CLASS_MEDIA;
  case ETIMEDOUT:
    return KVIO_CLASS_TIMEOUT;
  case ETIME:
    return KVIO_CLASS_DEADLINE;
  case EILSEQ:
    return KVIO_CLASS_PROTECTION;
  case EBADE:
    return KVIO_CLASS_RESERVATION;
  case ENOLINK:
    return KVIO_CLASS_TRANSPORT;
  case EREMOTEIO:
    return KVIO_CLASS_TARGET;
  case ENODEV:
  case ENXIO:
    return KVIO_CLASS_GONE;
  case ENOSPC:
  case EDQUOT:
    return KVIO_CLASS_SPACE;
  case EINVAL:
  case EFAULT:
  case EBADF:
  case EROFS:
  case EBUSY:
    return KVIO_CLASS_USAGE;
  case ESHUTDOWN:
  case ECANCELED:
    return KVIO_CLASS_SHUTDOWN;
  case EOPNOTSUPP:
  case ENOSYS:
    return KVIO_CLASS_UNSUPPORTED;
  default:
    return KVIO_CLASS_UNKNOWN;
  }
}

const char *kvio_error_class_name(enum kvio_error_class cls)
{
  static const char *const names[] = {
      [KVIO_CLASS_NONE] = "none",
      [KVIO_CLASS_MEDIA] = "media",
      [KVIO_CLASS_TIMEOUT] = "timeout",
      [KVIO_CLASS_DEADLINE] = "deadline",
      [KVIO_CLASS_PROTECTION] = "protection",
      [KVIO_CLASS_RESERVATION] = "reservation",
      [KVIO_CLASS_TRANSPORT] = "transport",
      [KVIO_CLASS_TARGET] = "target",
      [KVIO_CLASS_GONE] = "gone",
      [KVIO_CLASS_SPACE] = "space",
      [KVIO_CLASS_USAGE] = "usage",
      [KVIO_CLASS_SHUTDOWN] = "shutdown",
      [KVIO_CLASS_UNSUPPORTED] = "unsupported",
      [KVIO_CLASS_UNKNOWN] = "unknown",
  };
  return names[cls];
}
