/* SPDX-License-Identifier: Apache-2.0 */
#include "caller.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { DRAIN_NAP_NS = 200 * 1000 };

struct kvio_callers {
  struct kvio_shared *shared; /* NULL once the volume is closed */
  uint32_t fork_generation;
  _Atomic uint32_t refs; /* the volume and every entry */
  pthread_mutex_t lock;  /* birth and death of entries, close; never per call */
  _Atomic bool closing, closed;
  struct kvio_caller *head;
};

static _Thread_local struct kvio_caller *tls_callers;
static pthread_key_t exit_key;
static pthread_once_t exit_once = PTHREAD_ONCE_INIT;

static void list_put(struct kvio_callers *list)
{
  if (atomic_fetch_sub_explicit(&list->refs, 1, memory_order_acq_rel) != 1)
    return;
  pthread_mutex_destroy(&list->lock);
  free(list);
}

static void caller_put(struct kvio_caller *caller)
{
  if (atomic_fetch_sub_explicit(&caller->refs, 1, memory_order_acq_rel) != 1)
    return;
  list_put(caller->list);
  free(caller);
}

/* The list's lock held: takes the entry off and drops the volume's reference. */
static void unlink_caller(struct kvio_callers *list, struct kvio_caller *caller)
{
  if (caller->prev)
    caller->prev->next = caller->next;
  else
    list->head = caller->next;
  if (caller->next)
    caller->next->prev = caller->prev;
  caller_put(caller);
}

/* The thread goes and takes its lane with it. What it left in flight goes to quarantine; where the
 * kernel cannot tell its end the lane stays, and close() will say so. */
static void forsake(struct kvio_caller *caller)
{
  struct kvio_callers *list = caller->list;
  if (list->fork_generation != kvio_fork_generation())
    return; /* a child: all of this belongs to the parent */
  pthread_mutex_lock(&list->lock);
  if (!atomic_load(&list->closed)) {
    if (kvio_lane_in_flight(caller->lane) > 0)
      kvio_lane_retire(caller->lane);
    if (kvio_lane_in_flight(caller->lane) == 0) {
      kvio_lane_destroy(caller->lane);
      caller->lane = NULL;
      unlink_caller(list, caller);
    }
  }
  pthread_mutex_unlock(&list->lock);
  caller_put(caller);
}

static void on_thread_exit(void *unused)
{
  (void)unused;
  struct kvio_caller *caller = tls_callers;
  tls_callers = NULL;
  while (caller) {
    struct kvio_caller *next = caller->tls_next;
    forsake(caller);
    caller = next;
  }
}

static void make_exit_key(void)
{
  pthread_key_create(&exit_key, on_thread_exit);
}

int kvio_callers_create(struct kvio_callers **out, struct kvio_shared *shared)
{
  struct kvio_callers *list = calloc(1, sizeof(*list));
  if (!list)
    return -ENOMEM;
  pthread_once(&exit_once, make_exit_key);
  list->shared = shared;
  list->fork_generation = shared->fork_generation;
  atomic_init(&list->refs, 1);
  pthread_mutex_init(&list->lock, NULL);
  *out = list;
  return 0;
}

/* Entries of volumes that are closed by now. */
static void prune(void)
{
  struct kvio_caller **link = &tls_callers;
  while (*link) {
    struct kvio_caller *caller = *link;
    if (atomic_load(&caller->list->closed)) {
      *link = caller->tls_next;
      caller_put(caller);
    } else {
      link = &caller->tls_next;
    }
  }
}

static int add_caller(struct kvio_callers *list, struct kvio_caller **out)
{
  prune();
  struct kvio_caller *caller = calloc(1, sizeof(*caller));
  if (!caller)
    return -ENOMEM;
  pthread_mutex_lock(&list->lock);
  int rc = atomic_load(&list->closing) ? -ESHUTDOWN : kvio_lane_create(&caller->lane, list->shared);
  if (rc) {
    pthread_mutex_unlock(&list->lock);
    free(caller);
    return rc;
  }
  atomic_fetch_add_explicit(&list->refs, 1, memory_order_relaxed);
  caller->list = list;
  atomic_init(&caller->refs, 2);
  caller->next = list->head;
  if (list->head)
    list->head->prev = caller;
  list->head = caller;
  pthread_mutex_unlock(&list->lock);
  caller->tls_next = tls_callers;
  tls_callers = caller;
  pthread_setspecific(exit_key, caller); /* any value but NULL arms the destructor */
  *out = caller;
  return 0;
}

int kvio_caller_get(struct kvio_callers *list, struct kvio_caller **out)
{
  struct kvio_caller **link = &tls_callers;
  for (struct kvio_caller *caller = *link; caller; link = &caller->tls_next, caller = *link) {
    if (caller->list != list)
      continue;
    if (caller != tls_callers) { /* the one in use comes first */
      *link = caller->tls_next;
      caller->tls_next = tls_callers;
      tls_callers = caller;
    }
    *out = caller;
    return 0;
  }
  return add_caller(list, out);
}

int kvio_caller_enter(struct kvio_caller *caller)
{
  if (KVIO_UNLIKELY(caller->depth > 0)) {
    caller->depth++; /* C4: the outer call keeps close() waiting */
    return 0;
  }
  atomic_store(&caller->busy, true); /* seq_cst, C2 */
  if (KVIO_UNLIKELY(atomic_load(&caller->list->closing))) {
    atomic_store(&caller->busy, false);
    return -ESHUTDOWN;
  }
  caller->depth = 1;
  return 0;
}

void kvio_caller_leave(struct kvio_caller *caller)
{
  if (KVIO_LIKELY(--caller->depth == 0))
    atomic_store_explicit(&caller->busy, false, memory_order_release);
}

bool kvio_callers_inside(const struct kvio_callers *list)
{
  for (const struct kvio_caller *caller = tls_callers; caller; caller = caller->tls_next)
    if (caller->list == list)
      return caller->depth > 0;
  return false;
}

static uint32_t reap_caller(struct kvio_caller *caller)
{
  if (atomic_load(&caller->busy))
    return 1;
  if (kvio_lane_in_flight(caller->lane) > 0)
    kvio_lane_retire(caller->lane);
  return kvio_lane_in_flight(caller->lane);
}

void kvio_callers_close(struct kvio_callers *list)
{
  atomic_store(&list->closing, true); /* seq_cst, C2 */
}

uint32_t kvio_callers_drain(struct kvio_callers *list, uint64_t until)
{
  for (;;) {
    uint32_t left = 0;
    pthread_mutex_lock(&list->lock);
    for (struct kvio_caller *caller = list->head; caller; caller = caller->next)
      left += reap_caller(caller);
    left += kvio_quarantine_sweep(list->shared);
    if (left == 0)
      break;
    pthread_mutex_unlock(&list->lock);
    if (kvio_now_ns() >= until)
      return left;
    struct timespec nap = {0, DRAIN_NAP_NS};
    nanosleep(&nap, NULL);
  }
  atomic_store(&list->closed, true);
  while (list->head) {
    struct kvio_caller *caller = list->head;
    kvio_lane_destroy(caller->lane);
    caller->lane = NULL;
    unlink_caller(list, caller);
  }
  list->shared = NULL;
  pthread_mutex_unlock(&list->lock);
  return 0;
}

uint32_t kvio_callers_count(struct kvio_callers *list)
{
  uint32_t n = 0;
  pthread_mutex_lock(&list->lock);
  for (struct kvio_caller *caller = list->head; caller; caller = caller->next)
    n++;
  pthread_mutex_unlock(&list->lock);
  return n;
}

void kvio_callers_release(struct kvio_callers *list)
{
  list_put(list);
}
