/* SPDX-License-Identifier: Apache-2.0 */
#include "iothreads.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { STREAK = 8, CLAIM = 8, DIR_READ = 0, DIR_OTHER = 1 };

struct io_thread {
  pthread_t thread;
  struct kvio_iothreads *pool;
  struct kvio_stat_block *stat;
  uint32_t n; /* claimed and not released; the rest is under the pool's lock too */
  struct pool_member *member;
  struct kvio_seg *segs[CLAIM];
  struct kvio_batch *batches[CLAIM];
};

struct pool_member {
  struct kvio_seg *head[2];
  struct kvio_seg **tail[2];
  uint32_t queued[2];
  uint32_t inside; /* threads that work on it */
};

struct kvio_iothreads {
  struct kvio_shared *shared;
  pthread_mutex_t lock;
  pthread_cond_t work; /* a job was queued, or stop */
  pthread_cond_t gone; /* a thread has left */
  struct pool_member *members;
  uint32_t queued[2];
  uint32_t turn;
  uint32_t own_share, common, common_used; /* threads, X4 */
  uint32_t idle, starting, alive, started, streak;
  bool stop;
  struct io_thread *threads; /* shared->io_threads */
};

static int64_t transfer(const struct kvio_seg *seg, int fd)
{
  struct iovec one = {seg->addr, kvio_seg_left(seg)};
  const struct iovec *iov = seg->n_iov == 1 ? &one : seg->iov;
  off_t offset = (off_t)kvio_seg_offset(seg);
  ssize_t n = seg->opcode == KVIO_READ ? preadv2(fd, iov, seg->n_iov, offset, 0)
                                       : pwritev2(fd, iov, seg->n_iov, offset, 0);
  return n < 0 ? -errno : n;
}

static int control(const struct kvio_seg *seg, struct kvio_member *member)
{
  if (seg->opcode == KVIO_DISCARD)
    return kvio_device_discard(&member->dev, seg->offset, seg->length);
  int rc = kvio_device_flush(&member->dev);
  /* The kernel reports a lost write once. What it was stays unknown, so the failure stays too. */
  int clean = 0;
  if (rc < 0)
    atomic_compare_exchange_strong(&member->flush_errno, &clean, rc);
  return atomic_load(&member->flush_errno);
}

void kvio_seg_execute(struct kvio_seg *seg, struct kvio_stat_block *stat)
{
  struct kvio_member *member = &seg->batch->shared->members[seg->member];
  if (!kvio_batch_running(seg->batch)) {
    kvio_seg_complete(seg, -ECANCELED, kvio_now_ns(), stat);
    return;
  }
  seg->t_issue = kvio_now_ns();
  _Atomic int64_t *in_flight = &stat->member[seg->member].in_flight;
  atomic_fetch_add_explicit(in_flight, 1, memory_order_relaxed);
  int code = 0;
  if (seg->opcode > KVIO_WRITE) {
    code = control(seg, member);
  } else {
    kvio_count(&stat->direct_ops, 1);
    for (;;) {
      int64_t result = transfer(seg, member->dev.fd);
      enum kvio_transfer next = kvio_seg_advance(seg, result, &code, stat);
      if (next == KVIO_TRANSFER_DONE)
        break;
      if (next == KVIO_TRANSFER_RETRY && result == -ENOMEM) {
        struct timespec nap = {0, 1000 * 1000};
        nanosleep(&nap, NULL);
      }
    }
  }
  atomic_fetch_sub_explicit(in_flight, 1, memory_order_relaxed);
  kvio_seg_complete(seg, code, kvio_now_ns(), stat);
}

/* How many threads may work on one member while there are others: each member has an equal share of
 * half the threads for itself, the rest goes to whoever comes (X4). */
static bool may_serve(const struct kvio_iothreads *pool, const struct pool_member *member)
{
  if (member->inside < pool->own_share)
    return true;
  return pool->common_used < pool->common;
}

static void enter_member(struct kvio_iothreads *pool, struct pool_member *member, int sign)
{
  if (sign > 0 ? member->inside >= pool->own_share : member->inside > pool->own_share)
    pool->common_used += (uint32_t)sign;
  member->inside += (uint32_t)sign;
}

static struct kvio_seg *pop(struct kvio_iothreads *pool, struct pool_member *member, int dir)
{
  struct kvio_seg *seg = member->head[dir];
  member->head[dir] = seg->next;
  if (!seg->next)
    member->tail[dir] = &member->head[dir];
  member->queued[dir]--;
  pool->queued[dir]--;
  return seg;
}

/* The member in turn with work in this direction that a thread may take, or NULL. */
static struct pool_member *next_member(struct kvio_iothreads *pool, int dir)
{
  uint32_t n = pool->shared->n_members;
  for (uint32_t i = 0; pool->queued[dir] > 0 && i < n; i++) {
    struct pool_member *member = &pool->members[pool->turn];
    pool->turn = pool->turn + 1 == n ? 0 : pool->turn + 1;
    if (member->head[dir] && may_serve(pool, member))
      return member;
  }
  return NULL;
}

/* Takes up to CLAIM segments of one member, the pool's lock held. The batches are referred to until
 * release(), so that stop() may look at them. */
static bool claim(struct kvio_iothreads *pool, struct io_thread *self)
{
  int dir = pool->queued[DIR_OTHER] > 0 && pool->streak >= STREAK ? DIR_OTHER : DIR_READ;
  struct pool_member *member = next_member(pool, dir);
  if (!member) {
    dir = !dir;
    member = next_member(pool, dir);
  }
  if (!member)
    return false;
  pool->streak = dir == DIR_READ ? pool->streak + 1 : 0;
  /* Small shares near the end, so that nobody waits for the last one's hoard. */
  uint32_t share = member->queued[dir] / (2 * pool->shared->io_threads);
  uint32_t n = (uint32_t)kvio_min_u64(kvio_max_u64(share, 1), CLAIM);
  for (uint32_t i = 0; i < n; i++) {
    self->segs[i] = pop(pool, member, dir);
    self->batches[i] = self->segs[i]->batch;
    kvio_batch_ref(self->batches[i]);
  }
  self->n = n;
  self->member = member;
  enter_member(pool, member, 1);
  return true;
}

/* The lock held: what was claimed is done. */
static void release(struct kvio_iothreads *pool, struct io_thread *self)
{
  enter_member(pool, self->member, -1);
  for (uint32_t i = 0; i < self->n; i++)
    kvio_batch_put(self->batches[i]);
  self->n = 0;
}

static void *io_thread_main(void *arg)
{
  struct io_thread *self = arg;
  struct kvio_iothreads *pool = self->pool;
  pthread_mutex_lock(&pool->lock);
  pool->starting--;
  for (;;) {
    if (!claim(pool, self)) {
      if (pool->stop && pool->queued[DIR_READ] + pool->queued[DIR_OTHER] == 0)
        break;
      pool->idle++;
      pthread_cond_wait(&pool->work, &pool->lock);
      pool->idle--;
      continue;
    }
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < self->n; i++)
      kvio_seg_execute(self->segs[i], self->stat);
    pthread_mutex_lock(&pool->lock);
    release(pool, self);
    /* A member had reached its share: an idle thread may take its next segment now. */
    if (pool->idle > 0 && pool->queued[DIR_READ] + pool->queued[DIR_OTHER] > 0)
      pthread_cond_signal(&pool->work);
  }
  pool->alive--;
  pthread_cond_broadcast(&pool->work); /* the others may end too */
  pthread_cond_signal(&pool->gone);
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

int kvio_iothreads_create(struct kvio_iothreads **out, struct kvio_shared *shared)
{
  struct kvio_iothreads *pool = calloc(1, sizeof(*pool));
  if (!pool)
    return -ENOMEM;
  uint32_t n = shared->n_members;
  pool->threads = calloc(shared->io_threads, sizeof(*pool->threads));
  pool->members = calloc(n, sizeof(*pool->members));
  if (!pool->threads || !pool->members) {
    free(pool->threads);
    free(pool->members);
    free(pool);
    return -ENOMEM;
  }
  pool->own_share = (uint32_t)kvio_max_u64(shared->io_threads / (2 * n), 1);
  pool->common =
      shared->io_threads > n * pool->own_share ? shared->io_threads - n * pool->own_share : 0;
  pool->shared = shared;
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&pool->gone, &attr);
  pthread_condattr_destroy(&attr);
  for (uint32_t m = 0; m < n; m++)
    for (int d = 0; d < 2; d++)
      pool->members[m].tail[d] = &pool->members[m].head[d];
  *out = pool;
  return 0;
}

/* The pool's lock held. Signals are the application's business: block them in our threads. */
static int start_thread(struct kvio_iothreads *pool)
{
  struct io_thread *self = &pool->threads[pool->started];
  self->pool = pool;
  self->stat = kvio_stats_acquire(pool->shared);
  if (!self->stat)
    return -ENOMEM;
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &old);
  int rc = pthread_create(&self->thread, NULL, io_thread_main, self);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (rc) {
    kvio_stats_release(pool->shared, self->stat);
    return -rc;
  }
  pool->started++;
  pool->starting++;
  pool->alive++;
  return 0;
}

int kvio_iothreads_submit(struct kvio_iothreads *pool, struct kvio_batch *batch)
{
  int dir = batch->opcode == KVIO_READ ? DIR_READ : DIR_OTHER;
  pthread_mutex_lock(&pool->lock);
  /* A thread that was signalled and does not run yet counts as idle, and what it will take counts
   * as queued: so the two sides are compared as a whole. */
  uint32_t queued = pool->queued[DIR_READ] + pool->queued[DIR_OTHER] + batch->n_job;
  int rc = 0;
  while (rc == 0 && queued > pool->idle + pool->starting &&
         pool->started < pool->shared->io_threads)
    rc = start_thread(pool);
  if (pool->alive == 0) {
    pthread_mutex_unlock(&pool->lock);
    return rc ? rc : -EAGAIN;
  }
  for (struct kvio_seg *seg = batch->job, *next; seg; seg = next) {
    next = seg->next;
    struct pool_member *member = &pool->members[seg->member];
    seg->next = NULL;
    *member->tail[dir] = seg;
    member->tail[dir] = &seg->next;
    member->queued[dir]++;
    pool->queued[dir]++;
  }
  if (batch->n_job >= pool->idle)
    pthread_cond_broadcast(&pool->work);
  else
    for (uint32_t i = 0; i < batch->n_job; i++)
      pthread_cond_signal(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  return 0;
}

uint32_t kvio_iothreads_count(struct kvio_iothreads *pool)
{
  pthread_mutex_lock(&pool->lock);
  uint32_t n = pool->alive;
  pthread_mutex_unlock(&pool->lock);
  return n;
}

/* The lock held: nobody shall wait for what the threads did not get done. */
static void give_up(struct kvio_iothreads *pool)
{
  struct kvio_shared *shared = pool->shared;
  for (uint32_t i = 0; i < pool->started; i++)
    for (uint32_t k = 0; k < pool->threads[i].n; k++)
      kvio_batch_expire(pool->threads[i].batches[k], -ESHUTDOWN);
  struct kvio_stat_block *stat = kvio_stats_orphans(shared);
  for (uint32_t m = 0; m < shared->n_members; m++)
    for (int d = 0; d < 2; d++)
      while (pool->members[m].head[d])
        kvio_seg_complete(pop(pool, &pool->members[m], d), -ESHUTDOWN, kvio_now_ns(), stat);
  kvio_stats_orphans_done(shared);
  pthread_cond_broadcast(&pool->work);
}

bool kvio_iothreads_stop(struct kvio_iothreads *pool, uint64_t until)
{
  struct timespec ts = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
  pthread_mutex_lock(&pool->lock);
  pool->stop = true;
  pthread_cond_broadcast(&pool->work);
  int rc = 0;
  while (pool->alive > 0 && rc == 0)
    rc = pthread_cond_timedwait(&pool->gone, &pool->lock, &ts);
  bool stopped = pool->alive == 0;
  if (!stopped)
    give_up(pool);
  pthread_mutex_unlock(&pool->lock);
  for (uint32_t i = 0; stopped && i < pool->started; i++)
    pthread_join(pool->threads[i].thread, NULL);
  return stopped;
}

void kvio_iothreads_destroy(struct kvio_iothreads *pool)
{
  for (uint32_t i = 0; i < pool->started; i++)
    kvio_stats_release(pool->shared, pool->threads[i].stat);
  pthread_mutex_destroy(&pool->lock);
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->gone);
  free(pool->threads);
  free(pool->members);
  free(pool);
}
