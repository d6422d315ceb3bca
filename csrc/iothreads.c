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
};

struct kvio_iothreads {
  struct kvio_shared *shared;
  pthread_mutex_t lock;
  pthread_cond_t work; /* a job was queued, or stop */
  pthread_cond_t gone; /* a thread has left */
  struct kvio_job *head[2];
  struct kvio_job **tail[2];
  uint32_t idle, alive, started, streak;
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
  kvio_seg_complete(seg, code, kvio_now_ns(), stat);
}

static void unlink_job(struct kvio_iothreads *pool, struct kvio_job *job)
{
  *job->link = job->next;
  if (job->next)
    job->next->link = job->link;
  else if (pool->tail[DIR_READ] == &job->next)
    pool->tail[DIR_READ] = job->link;
  else
    pool->tail[DIR_OTHER] = job->link;
  job->link = NULL;
}

/* Claims up to CLAIM segments of the job, the pool's lock held; returns how many. */
static uint32_t claim(struct kvio_iothreads *pool, struct kvio_job *job, struct kvio_seg **out)
{
  uint32_t left = job->n - job->claimed;
  /* Small shares near the end, so that nobody waits for the last one's hoard. */
  uint32_t share = left / (2 * pool->shared->io_threads);
  uint32_t n = (uint32_t)kvio_min_u64(kvio_min_u64(kvio_max_u64(share, 1), CLAIM), left);
  for (uint32_t i = 0; i < n; i++)
    out[i] = job->segs[job->claimed + i];
  job->claimed += n;
  if (n > 0 && job->claimed == job->n)
    unlink_job(pool, job); /* X1 */
  return n;
}

static struct kvio_job *next_job(struct kvio_iothreads *pool)
{
  bool other_turn = pool->head[DIR_OTHER] && pool->streak >= STREAK;
  if (pool->head[DIR_READ] && !other_turn) {
    pool->streak++;
    return pool->head[DIR_READ];
  }
  pool->streak = 0;
  return pool->head[DIR_OTHER];
}

static void *io_thread_main(void *arg)
{
  struct io_thread *self = arg;
  struct kvio_iothreads *pool = self->pool;
  pthread_mutex_lock(&pool->lock);
  for (;;) {
    struct kvio_job *job = next_job(pool);
    if (!job) {
      if (pool->stop)
        break;
      pool->idle++;
      pthread_cond_wait(&pool->work, &pool->lock);
      pool->idle--;
      continue;
    }
    struct kvio_seg *segs[CLAIM];
    uint32_t n = claim(pool, job, segs);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < n; i++)
      kvio_seg_execute(segs[i], self->stat);
    pthread_mutex_lock(&pool->lock);
  }
  pool->alive--;
  pthread_cond_signal(&pool->gone);
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

int kvio_iothreads_create(struct kvio_iothreads **out, struct kvio_shared *shared)
{
  struct kvio_iothreads *pool = calloc(1, sizeof(*pool));
  if (!pool)
    return -ENOMEM;
  pool->threads = calloc(shared->io_threads, sizeof(*pool->threads));
  if (!pool->threads) {
    free(pool);
    return -ENOMEM;
  }
  pool->shared = shared;
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&pool->gone, &attr);
  pthread_condattr_destroy(&attr);
  for (int d = 0; d < 2; d++)
    pool->tail[d] = &pool->head[d];
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
  pool->alive++;
  return 0;
}

int kvio_iothreads_submit(struct kvio_iothreads *pool, struct kvio_batch *batch, bool help)
{
  struct kvio_job *job = &batch->job;
  int dir = batch->opcode == KVIO_READ ? DIR_READ : DIR_OTHER;
  pthread_mutex_lock(&pool->lock);
  uint32_t want = job->n - (help ? 1 : 0);
  int rc = 0;
  uint32_t wake = (uint32_t)kvio_min_u64(want, pool->idle);
  while (rc == 0 && want > wake && pool->started < pool->shared->io_threads) {
    rc = start_thread(pool);
    if (rc == 0)
      wake++;
  }
  if (pool->alive == 0 && !help) {
    pthread_mutex_unlock(&pool->lock);
    return rc ? rc : -EAGAIN;
  }
  job->next = NULL;
  job->link = pool->tail[dir];
  *job->link = job;
  pool->tail[dir] = &job->next;
  if (wake >= pool->idle)
    pthread_cond_broadcast(&pool->work);
  else
    for (uint32_t i = 0; i < wake; i++)
      pthread_cond_signal(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  return 0;
}

void kvio_iothreads_help(struct kvio_iothreads *pool, struct kvio_batch *batch,
                         struct kvio_stat_block *stat)
{
  struct kvio_seg *segs[CLAIM];
  uint32_t n;
  do {
    pthread_mutex_lock(&pool->lock);
    n = claim(pool, &batch->job, segs);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < n; i++)
      kvio_seg_execute(segs[i], stat);
  } while (n > 0);
}

uint32_t kvio_iothreads_count(struct kvio_iothreads *pool)
{
  pthread_mutex_lock(&pool->lock);
  uint32_t n = pool->alive;
  pthread_mutex_unlock(&pool->lock);
  return n;
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
  free(pool);
}
