/* SPDX-License-Identifier: Apache-2.0 */
#include "volume.h"

#include <stdlib.h>
#include <string.h>

/* One command up to this size is done by a plain preadv in the caller: a ring costs more than it
 * brings when there is nothing to overlap (docs/performance.md has the figures). Not for a caller
 * that wants to be interruptible: a preadv on a stalled device cannot be left. */
#define SHORT_WAY_BYTES (UINT64_C(1) << 20)

#define NS_PER_MS UINT64_C(1000000)
#define SETTLE_NS (1000 * NS_PER_MS)
#define INTERRUPT_TICK_NS (100 * NS_PER_MS)
#define IDLE_NAP_NS (200 * 1000)

static int free_members(struct kvio_volume *vol, int rc)
{
  for (uint32_t i = 0; i < vol->shared.n_members; i++)
    if (vol->shared.members[i].dev.fd >= 0)
      kvio_device_close(&vol->shared.members[i].dev);
  return rc;
}

int kvio_volume_open(struct kvio_volume **out, const struct kvio_volume_opts *opts,
                     struct kvio_error *err)
{
  if (err)
    *err = (struct kvio_error){.member = -1, .op = KVIO_OPEN};
  uint32_t n = opts->n_paths >= 1 && opts->n_paths <= KVIO_MAX_MEMBERS ? opts->n_paths : 1;
  struct kvio_volume *vol = calloc(1, sizeof(*vol));
  if (!vol || kvio_shared_init(&vol->shared, n) != 0) {
    free(vol);
    return kvio_error_set(err, -ENOMEM, "no memory for a volume of %u members", opts->n_paths);
  }
  pthread_mutex_init(&vol->start_lock, NULL);
  int rc = kvio_volume_open_members(vol, opts, err);
  if (rc == 0) {
    rc = kvio_callers_create(&vol->callers, &vol->shared);
    if (rc == 0)
      rc = kvio_iothreads_create(&vol->pool, &vol->shared);
    if (rc)
      kvio_error_set(err, rc, "no memory for a volume of %u members", opts->n_paths);
  }
  if (rc == 0)
    rc = kvio_volume_pick_engines(vol, opts, err);
  if (rc) {
    kvio_volume_close(vol, 1000 * NS_PER_MS, NULL, NULL, NULL);
    kvio_volume_free(vol);
    return rc;
  }
  *out = vol;
  return 0;
}

static bool forked(const struct kvio_volume *vol)
{
  return kvio_shared_forked(&vol->shared);
}

static int refuse_forked(struct kvio_error *err)
{
  return kvio_error_set(err, -EPERM,
                        "this volume was opened before a fork(): a child must open its "
                        "own, the rings and threads belong to the parent");
}

/* The calling thread's entry, marked busy. */
static int enter(struct kvio_volume *vol, struct kvio_caller **caller, struct kvio_error *err)
{
  if (KVIO_UNLIKELY(forked(vol)))
    return refuse_forked(err);
  if (KVIO_UNLIKELY(atomic_load_explicit(&vol->state, memory_order_acquire) != KVIO_VOLUME_OPEN))
    return kvio_error_set(err, -ESHUTDOWN, "the volume is closed");
  int rc = kvio_caller_get(vol->callers, caller);
  if (rc == 0)
    rc = kvio_caller_enter(*caller);
  if (rc)
    kvio_error_set(err, rc, rc == -ESHUTDOWN ? "the volume is closed" : "no memory for a lane");
  return rc;
}

static int start_workers(struct kvio_volume *vol, struct kvio_error *err)
{
  /* acquire: pairs with the release below; the pointers are written before the count */
  if (atomic_load_explicit(&vol->workers_running, memory_order_acquire) == vol->shared.n_workers)
    return 0;
  int rc = 0;
  pthread_mutex_lock(&vol->start_lock);
  uint32_t n = atomic_load_explicit(&vol->workers_running, memory_order_relaxed);
  while (n < vol->shared.n_workers) {
    rc = kvio_worker_start(&vol->workers[n], &vol->shared, vol->pool);
    if (rc)
      break;
    atomic_store_explicit(&vol->workers_running, ++n, memory_order_release);
  }
  pthread_mutex_unlock(&vol->start_lock);
  return rc ? kvio_error_set(err, rc,
                             "a worker thread could not be started: %s (see ulimit -u and "
                             "-n)",
                             strerror(-rc))
            : 0;
}

static int submit(struct kvio_volume *vol, enum kvio_opcode opcode, const struct kvio_op *ops,
                  uint32_t n_ops, uint64_t deadline_ns, void *owner, struct kvio_batch **out,
                  struct kvio_error *err)
{
  int rc = start_workers(vol, err);
  if (rc == 0)
    rc = kvio_batch_create(out, &vol->shared, opcode, ops, n_ops, deadline_ns, owner, err);
  if (rc)
    return rc;
  struct kvio_batch *batch = *out;
  kvio_batch_start(batch);
  if (batch->n_segs == 0)
    return 0;
  /* The engine may be done with a shard before the next is pushed; our own reference holds. */
  for (uint32_t w = 0; w < vol->shared.n_workers; w++)
    if (batch->shards[w].segs || batch->shards[w].runs_job)
      kvio_worker_push(vol->workers[w], &batch->shards[w]);
  return 0;
}

static void clear_error(struct kvio_error *err, enum kvio_opcode op)
{
  if (err)
    *err = (struct kvio_error){.member = -1, .op = op};
}

int kvio_volume_submit(struct kvio_volume *vol, enum kvio_opcode opcode, const struct kvio_op *ops,
                       uint32_t n_ops, uint64_t deadline_ns, void *owner, struct kvio_batch **out,
                       struct kvio_error *err)
{
  struct kvio_caller *caller;
  clear_error(err, opcode);
  int rc = enter(vol, &caller, err);
  if (rc)
    return rc;
  if (deadline_ns == KVIO_NO_DEADLINE)
    deadline_ns = vol->shared.deadline_ns;
  rc = submit(vol, opcode, ops, n_ops, deadline_ns, owner, out, err);
  kvio_caller_leave(caller);
  return rc;
}

/* Ring segments on the caller's own ring; without one (no memory, no descriptors) by preadv. */
static int run_ring(struct kvio_volume *vol, struct kvio_lane *lane, struct kvio_batch *batch,
                    kvio_interrupt_fn interrupt, void *interrupt_arg)
{
  int rc = kvio_lane_ring(lane) || kvio_lane_dead(lane) ? 0 : kvio_lane_open_ring(lane, false);
  if (rc == 0) {
    for (uint32_t w = 0; w < vol->shared.n_workers; w++)
      kvio_lane_enqueue(lane, batch->shards[w].segs);
    rc = kvio_lane_run(lane, batch, batch->n_ring_segs, interrupt, interrupt_arg);
    if (rc == -EINTR && kvio_lane_in_flight(lane) > 0)
      kvio_lane_retire(lane);
    return rc;
  }
  for (uint32_t w = 0; w < vol->shared.n_workers; w++) {
    struct kvio_seg *next;
    for (struct kvio_seg *seg = batch->shards[w].segs; seg; seg = next) {
      next = seg->next;
      if (vol->shared.members[seg->member].engine == KVIO_ENGINE_URING_CMD)
        kvio_seg_complete(seg, rc, kvio_now_ns(), kvio_lane_stat(lane));
      else
        kvio_seg_execute(seg, kvio_lane_stat(lane));
    }
  }
  return 0;
}

static bool takes_short_way(const struct kvio_shared *shared, const struct kvio_batch *batch)
{
  const struct kvio_seg *seg = &batch->segs[0];
  if (batch->n_segs != 1)
    return false;
  enum kvio_engine engine = shared->members[seg->member].engine;
  if (seg->opcode > KVIO_WRITE || engine == KVIO_ENGINE_THREADS)
    return true;
  return engine == KVIO_ENGINE_URING && !shared->iopoll && seg->length <= SHORT_WAY_BYTES;
}

/* Runs a batch that has no deadline in the calling thread. */
static int run_here(struct kvio_volume *vol, struct kvio_lane *lane, struct kvio_batch *batch,
                    kvio_interrupt_fn interrupt, void *interrupt_arg)
{
  kvio_batch_start(batch);
  if (batch->n_segs == 0)
    return 0;
  struct kvio_stat_block *stat = kvio_lane_stat(lane);
  if (!interrupt && takes_short_way(&vol->shared, batch)) {
    kvio_seg_execute(&batch->segs[0], stat);
    return 0;
  }
  int rc = 0;
  if (batch->n_job > 0 && kvio_iothreads_submit(vol->pool, batch) != 0) {
    for (struct kvio_seg *seg = batch->job, *next; seg; seg = next) {
      next = seg->next; /* no thread to be had: one by one, and not interruptible */
      kvio_seg_execute(seg, stat);
    }
  }
  if (batch->n_ring_segs > 0)
    rc = run_ring(vol, lane, batch, interrupt, interrupt_arg);
  if (batch->n_job > 0) {
    if (rc == 0)
      rc = kvio_batch_wait(batch, UINT64_MAX, interrupt, interrupt_arg);
    if (rc == -EINTR)
      kvio_batch_expire(batch, -EINTR);
  }
  return rc;
}

int kvio_volume_run(struct kvio_volume *vol, enum kvio_opcode opcode, const struct kvio_op *ops,
                    uint32_t n_ops, uint64_t deadline_ns, void *owner, kvio_interrupt_fn interrupt,
                    void *interrupt_arg, struct kvio_batch **out, struct kvio_error *err)
{
  struct kvio_caller *caller;
  clear_error(err, opcode);
  int rc = enter(vol, &caller, err);
  if (rc)
    return rc;
  if (deadline_ns == KVIO_NO_DEADLINE)
    deadline_ns = vol->shared.deadline_ns;
  *out = NULL;
  if (deadline_ns == KVIO_NO_DEADLINE && caller->depth == 1) {
    rc = kvio_batch_create(out, &vol->shared, opcode, ops, n_ops, 0, owner, err);
    if (rc == 0)
      rc = run_here(vol, caller->lane, *out, interrupt, interrupt_arg);
    kvio_caller_leave(caller);
    return rc;
  }
  /* With a deadline a worker does it: it goes on reaping when this thread has given up. And so for
   * a signal handler in the middle of a call: the lane is that call's. */
  rc = submit(vol, opcode, ops, n_ops, deadline_ns, owner, out, err);
  kvio_caller_leave(caller);
  if (rc)
    return rc;
  rc = kvio_batch_wait(*out, UINT64_MAX, interrupt, interrupt_arg);
  if (rc == -EINTR)
    kvio_batch_expire(*out, -EINTR);
  return rc;
}

uint32_t kvio_volume_reclaim(struct kvio_volume *vol, void **owners, uint32_t max)
{
  if (forked(vol))
    return 0;
  kvio_quarantine_sweep(&vol->shared);
  return kvio_shared_reclaim(&vol->shared, owners, max);
}

bool kvio_volume_has_reclaim(const struct kvio_volume *vol)
{
  return atomic_load_explicit(&vol->shared.reclaim, memory_order_relaxed) != NULL ||
         kvio_quarantine_any(&vol->shared);
}

/* The calling thread's ring follows the registry at once, so that a refusal is known here. */
static int register_here(struct kvio_volume *vol, struct kvio_caller *caller)
{
  struct kvio_lane *lane = caller->lane;
  atomic_store(&vol->shared.registry.last_errno, 0);
  if (caller->depth == 1 && vol->shared.uring_granted && !kvio_lane_dead(lane) &&
      (kvio_lane_ring(lane) || kvio_lane_open_ring(lane, false) == 0))
    kvio_lane_step(lane, 0, 0);
  return -atomic_load(&vol->shared.registry.last_errno);
}

int kvio_volume_register(struct kvio_volume *vol, void *addr, size_t nbytes, bool huge,
                         struct kvio_error *err)
{
  clear_error(err, KVIO_REGISTER);
  struct kvio_caller *caller;
  int rc = enter(vol, &caller, err);
  if (rc)
    return rc;
  rc = kvio_registry_add(&vol->shared.registry, addr, nbytes, huge);
  if (rc == 0)
    rc = register_here(vol, caller);
  else if (rc == -EEXIST)
    kvio_error_set(err, rc, "this memory overlaps a region that is registered already");
  else if (rc == -ENOSPC)
    kvio_error_set(err, rc,
                   "all %d slices of at most 1 GiB are taken: unregister another region first",
                   KVIO_MAX_SLICES);
  else
    kvio_error_set(err, rc, "a region needs an address and 1 byte to 64 GiB");
  kvio_caller_leave(caller);
  return rc;
}

int kvio_volume_unregister(struct kvio_volume *vol, void *addr)
{
  if (forked(vol))
    return -EPERM;
  return kvio_registry_remove(&vol->shared.registry, addr);
}

/* Stops the threads; the number of commands and threads that did not end in time. */
static uint32_t stop_threads(struct kvio_volume *vol, uint64_t until)
{
  uint32_t left = 0;
  uint32_t n = atomic_load(&vol->workers_running);
  for (uint32_t w = 0; w < n; w++)
    kvio_worker_stop(vol->workers[w], until);
  for (uint32_t w = 0; w < n; w++)
    left += kvio_worker_join(vol->workers[w], until + 500 * NS_PER_MS) != 0;
  if (vol->pool && !kvio_iothreads_stop(vol->pool, until + 500 * NS_PER_MS))
    left++;
  return left;
}

static void free_threads(struct kvio_volume *vol)
{
  uint32_t n = atomic_load(&vol->workers_running);
  for (uint32_t w = 0; w < n; w++)
    kvio_worker_destroy(vol->workers[w]);
  if (vol->pool)
    kvio_iothreads_destroy(vol->pool);
}

/* Waits until no batch is under way, or `until`. True when interrupt asked to wait no longer. */
static bool wait_idle(struct kvio_volume *vol, uint64_t until, kvio_interrupt_fn interrupt,
                      void *interrupt_arg)
{
  struct kvio_shared *shared = &vol->shared;
  uint64_t tick = kvio_now_ns() + INTERRUPT_TICK_NS;
  while (atomic_load_explicit(&shared->active_reads, memory_order_relaxed) +
             atomic_load_explicit(&shared->active_others, memory_order_relaxed) >
         0) {
    uint64_t now = kvio_now_ns();
    if (now >= until)
      return false;
    if (now >= tick) {
      if (interrupt && interrupt(interrupt_arg) != 0)
        return true;
      tick = now + INTERRUPT_TICK_NS;
    }
    /* what was given up is finished by whoever looks for its end */
    kvio_quarantine_sweep(shared);
    struct timespec nap = {0, IDLE_NAP_NS};
    nanosleep(&nap, NULL);
  }
  return false;
}

int kvio_volume_close(struct kvio_volume *vol, uint64_t timeout_ns, kvio_interrupt_fn interrupt,
                      void *interrupt_arg, struct kvio_error *err)
{
  clear_error(err, KVIO_CLOSE);
  int open = KVIO_VOLUME_OPEN;
  if (forked(vol)) { /* the child's copies of the descriptors are its own to close */
    if (atomic_compare_exchange_strong(&vol->state, &open, KVIO_VOLUME_LEAKED))
      free_members(vol, 0);
    return 0;
  }
  if (vol->callers && kvio_callers_inside(vol->callers))
    return kvio_error_set(err, -EDEADLK,
                          "close: this thread is in the middle of a call of this volume (a signal "
                          "handler?); close it after that call");
  if (!atomic_compare_exchange_strong(&vol->state, &open, KVIO_VOLUME_CLOSING))
    return 0;
  uint64_t until;
  if (__builtin_add_overflow(kvio_now_ns(), timeout_ns, &until) || until > INT64_MAX)
    until = INT64_MAX;
  uint32_t left = 0;
  bool interrupted = false;
  if (vol->callers) { /* first: a thread that is inside may still push to a worker */
    kvio_callers_close(vol->callers);
    interrupted = wait_idle(vol, until, interrupt, interrupt_arg);
    until = interrupted ? kvio_now_ns() : until;
    left = kvio_callers_drain(vol->callers, until);
  }
  left += stop_threads(vol, until);
  left += kvio_quarantine_sweep(&vol->shared); /* what the workers gave up */
  if (left == 0) {
    free_threads(vol);
    if (vol->callers)
      kvio_callers_release(vol->callers);
    /* Whoever counts openers of a member (losetup -d, a partition table) shall find none. */
    kvio_quarantine_settle(&vol->shared, kvio_now_ns() + SETTLE_NS);
    free_members(vol, 0);
    atomic_store(&vol->state, KVIO_VOLUME_CLOSED);
    return interrupted ? -EINTR : 0;
  }
  atomic_store(&vol->state, KVIO_VOLUME_LEAKED);
  return kvio_error_set(
      err, interrupted ? -EINTR : -ETIME,
      "close: I/O was still in flight when the timeout passed; its buffers and "
      "the members' descriptors are kept, since the kernel may still write there");
}

void kvio_volume_free(struct kvio_volume *vol)
{
  if (!vol || forked(vol) || atomic_load(&vol->state) != KVIO_VOLUME_CLOSED)
    return;
  kvio_shared_destroy(&vol->shared);
  pthread_mutex_destroy(&vol->start_lock);
  free(vol);
}
