/* SPDX-License-Identifier: Apache-2.0 */
#include "worker.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* How often the active list is looked through for batches that ended out of order. */
#define SWEEP_NS UINT64_C(50000000)
/* The waits for a group are shorter than the kernel's usual 50 us of slack. */
#define TIMER_SLACK_NS 1000ul

struct kvio_worker {
  struct kvio_shared *shared;
  struct kvio_iothreads *pool;
  struct kvio_lane *lane;
  pthread_t thread;
  int event_fd;
  _Atomic(struct kvio_shard *) inbox;
  _Atomic bool sleeping;
  _Atomic bool stop;
  _Atomic uint64_t stop_at;
  struct kvio_shard *active_head, *active_tail;
  uint64_t next_sweep;
};

void kvio_worker_push(struct kvio_worker *worker, struct kvio_shard *shard)
{
  kvio_batch_ref(shard->batch);
  struct kvio_shard *head = atomic_load_explicit(&worker->inbox, memory_order_relaxed);
  do
    shard->next = head;
  while (!atomic_compare_exchange_weak(&worker->inbox, &head, shard)); /* seq_cst: W2 */
  if (atomic_load(&worker->sleeping) && atomic_exchange(&worker->sleeping, false))
    kvio_event_signal(worker->event_fd);
}

static void activate(struct kvio_worker *worker, struct kvio_shard *shard)
{
  shard->next_active = NULL;
  shard->prev_active = worker->active_tail;
  if (worker->active_tail)
    worker->active_tail->next_active = shard;
  else
    worker->active_head = shard;
  worker->active_tail = shard;
}

static void retire(struct kvio_worker *worker, struct kvio_shard *shard)
{
  if (shard->prev_active)
    shard->prev_active->next_active = shard->next_active;
  else
    worker->active_head = shard->next_active;
  if (shard->next_active)
    shard->next_active->prev_active = shard->prev_active;
  else
    worker->active_tail = shard->prev_active;
  kvio_batch_put(shard->batch);
}

/* No thread could be started for the job's segments: they fail here. */
static void fail_job(struct kvio_worker *worker, struct kvio_batch *batch, int code)
{
  for (struct kvio_seg *seg = batch->job, *next; seg; seg = next) {
    next = seg->next;
    kvio_seg_complete(seg, code, kvio_now_ns(), kvio_lane_stat(worker->lane));
  }
}

static void take_shard(struct kvio_worker *worker, struct kvio_shard *shard)
{
  struct kvio_batch *batch = shard->batch;
  bool timed = batch->deadline != 0;
  if (timed)
    activate(worker, shard);
  if (shard->segs)
    kvio_lane_enqueue(worker->lane, shard->segs);
  if (shard->runs_job) {
    int rc = kvio_iothreads_submit(worker->pool, batch);
    if (rc)
      fail_job(worker, batch, rc);
  }
  if (!timed)
    kvio_batch_put(batch);
}

static void take_inbox(struct kvio_worker *worker)
{
  struct kvio_shard *list = atomic_exchange(&worker->inbox, NULL);
  struct kvio_shard *in_order = NULL;
  while (list) {
    struct kvio_shard *next = list->next;
    list->next = in_order;
    in_order = list;
    list = next;
  }
  while (in_order) {
    struct kvio_shard *shard = in_order;
    in_order = shard->next;
    take_shard(worker, shard);
  }
}

/* Expires what is due; returns how long the worker may sleep. */
static uint64_t keep_deadlines(struct kvio_worker *worker)
{
  while (worker->active_head && !kvio_batch_running(worker->active_head->batch))
    retire(worker, worker->active_head);
  if (!worker->active_head)
    return UINT64_MAX;
  uint64_t now = kvio_now_ns();
  if (now >= worker->next_sweep) {
    worker->next_sweep = now + SWEEP_NS;
    for (struct kvio_shard *shard = worker->active_head, *next; shard; shard = next) {
      next = shard->next_active;
      uint64_t deadline = shard->batch->deadline;
      if (deadline <= now)
        kvio_batch_expire(shard->batch, -ETIME);
      if (!kvio_batch_running(shard->batch))
        retire(worker, shard);
      else
        worker->next_sweep = kvio_min_u64(worker->next_sweep, deadline);
    }
  }
  uint64_t first = worker->active_head ? worker->active_head->batch->deadline : UINT64_MAX;
  worker->next_sweep = kvio_min_u64(worker->next_sweep, first);
  return worker->next_sweep > now ? worker->next_sweep - now : 0;
}

/* Waits without a ring (there is none, it is polled, or it died): until an eventfd signal or the
 * timeout. */
static void nap(struct kvio_worker *worker, uint64_t timeout_ns)
{
  struct pollfd pfd = {.fd = worker->event_fd, .events = POLLIN};
  struct timespec ts = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
  uint64_t value;
  if (ppoll(&pfd, 1, timeout_ns == UINT64_MAX ? NULL : &ts, NULL) > 0)
    (void)!read(worker->event_fd, &value, sizeof(value));
}

static bool may_end(struct kvio_worker *worker)
{
  if (!atomic_load(&worker->stop) || atomic_load(&worker->inbox))
    return false;
  if (kvio_lane_queued(worker->lane) + kvio_lane_in_flight(worker->lane) == 0)
    return true;
  return kvio_now_ns() >= atomic_load(&worker->stop_at);
}

/* Sends what is queued, and waits for completions, work or the timeout. */
static void rest(struct kvio_worker *worker, uint64_t timeout_ns)
{
  bool ring = kvio_lane_ring(worker->lane) != NULL && !kvio_lane_dead(worker->lane);
  bool busy = kvio_lane_in_flight(worker->lane) + kvio_lane_queued(worker->lane) > 0;
  /* A polled ring cannot wait for an eventfd: it spins while it has work, and naps otherwise. */
  bool polls = ring && worker->shared->iopoll;
  if ((polls && busy) || kvio_lane_dead(worker->lane))
    kvio_lane_step(worker->lane, 0, 0);
  if (polls && busy)
    return;
  uint32_t group;
  uint64_t tick;
  if (ring && kvio_lane_group(worker->lane, &group, &tick)) {
    kvio_lane_step(worker->lane, group, kvio_min_u64(timeout_ns, tick)); /* W2 */
    return;
  }
  atomic_store(&worker->sleeping, true);
  if (!atomic_load(&worker->inbox) && !(atomic_load(&worker->stop) && !busy)) {
    if (atomic_load(&worker->stop))
      timeout_ns = kvio_min_u64(timeout_ns, 10 * 1000 * 1000);
    if (ring && !polls)
      kvio_lane_step(worker->lane, 1, timeout_ns);
    else
      nap(worker, timeout_ns);
  } else if (ring) {
    kvio_lane_step(worker->lane, 0, 0);
  }
  atomic_store(&worker->sleeping, false);
}

static void *worker_main(void *arg)
{
  struct kvio_worker *worker = arg;
  bool ring = kvio_lane_ring(worker->lane) != NULL;
  int rc = ring ? kvio_lane_enable(worker->lane) : 0;
  if (rc)
    kvio_lane_abandon(worker->lane, rc); /* whatever comes fails with that */
  else if (ring && !worker->shared->iopoll)
    kvio_lane_watch(worker->lane, worker->event_fd);
  prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
  while (!may_end(worker)) {
    take_inbox(worker);
    rest(worker, keep_deadlines(worker));
  }
  if (kvio_lane_in_flight(worker->lane) > 0)
    kvio_lane_abandon(worker->lane, -ESHUTDOWN);
  while (worker->active_head) {
    kvio_batch_expire(worker->active_head->batch, -ESHUTDOWN);
    retire(worker, worker->active_head);
  }
  if (kvio_lane_in_flight(worker->lane) == 0)
    kvio_lane_close_ring(worker->lane);
  return NULL;
}

int kvio_worker_start(struct kvio_worker **out, struct kvio_shared *shared,
                      struct kvio_iothreads *pool)
{
  struct kvio_worker *worker = calloc(1, sizeof(*worker));
  if (!worker)
    return -ENOMEM;
  worker->shared = shared;
  worker->pool = pool;
  worker->event_fd = eventfd(0, EFD_CLOEXEC); /* blocking: a ring's read of it has to wait */
  int rc = worker->event_fd < 0 ? -errno : 0;
  if (rc == 0)
    rc = kvio_lane_create(&worker->lane, shared);
  if (rc == 0 && shared->uring_granted)
    rc = kvio_lane_open_ring(worker->lane, true);
  if (rc == 0) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    rc = -pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
  }
  if (rc) {
    if (worker->lane)
      kvio_lane_destroy(worker->lane);
    if (worker->event_fd >= 0)
      close(worker->event_fd);
    free(worker);
    return rc;
  }
  *out = worker;
  return 0;
}

void kvio_worker_stop(struct kvio_worker *worker, uint64_t until)
{
  atomic_store(&worker->stop_at, until);
  atomic_store(&worker->stop, true);
  kvio_event_signal(worker->event_fd);
}

uint32_t kvio_worker_join(struct kvio_worker *worker, uint64_t until)
{
  struct timespec ts = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
  if (pthread_clockjoin_np(worker->thread, NULL, CLOCK_MONOTONIC, &ts) != 0)
    return UINT32_MAX;
  return kvio_lane_in_flight(worker->lane);
}

void kvio_worker_destroy(struct kvio_worker *worker)
{
  kvio_lane_destroy(worker->lane);
  close(worker->event_fd);
  free(worker);
}
