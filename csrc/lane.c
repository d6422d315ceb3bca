/* SPDX-License-Identifier: Apache-2.0 */
#include "lane.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nvme.h"

enum {
  REAP = 128,
  SPARE = 8, /* ring entries beyond the slots: the wake-up */
  STREAK = 8,
  DEAD_AFTER = 16,
  INTERRUPT_TICK_NS = 100 * 1000 * 1000,
  GRACE_TICKS = 3, /* an interrupted call waits that many ticks for what is in flight */
  BACKOFF_NS = 1000 * 1000,
  GROUP_PART = 8, /* of what is in flight comes together, */
  GROUP_MAX = 32,
  GROUP_NS = 500 * 1000, /* or nothing is waited for any longer */
};

#define TOKEN_WAKE UINT64_MAX

struct slot {
  struct kvio_seg *seg;
  uint32_t generation;
  uint32_t next_free;
};

struct lane_member {
  struct kvio_seg *head[2];
  struct kvio_seg **tail[2];
  uint32_t in_flight;
};

struct kvio_lane {
  struct kvio_shared *shared;
  struct kvio_ring *ring;
  struct kvio_stat_block *stat;
  struct kvio_view view;
  uint32_t n_slots, free_slot;
  uint32_t limit; /* in flight now allowed: halved by ENOMEM, grows back */
  uint32_t in_flight, writes_in_flight;
  uint32_t queued[2];
  uint32_t streak;
  uint32_t next_member;
  uint32_t failed_enters;
  int dead; /* -errno */
  bool backoff;
  bool lone;           /* the last wait for a group brought nothing */
  uint64_t service_ns; /* the quickest completions of late: falls at once, grows by 1/16 */
  uint64_t bytes_in_flight;
  int event_fd;
  bool wake_armed;
  uint64_t wake_value;
  const struct kvio_batch *running; /* what kvio_lane_run waits for */
  uint32_t running_left;
  struct slot *slots;
  uint64_t *tokens; /* room for all that one submission can hold */
  struct lane_member members[];
};

int kvio_lane_create(struct kvio_lane **out, struct kvio_shared *shared)
{
  size_t bytes = sizeof(struct kvio_lane) + shared->n_members * sizeof(struct lane_member);
  struct kvio_lane *lane = calloc(1, bytes);
  if (!lane)
    return -ENOMEM;
  lane->shared = shared;
  lane->event_fd = -1;
  lane->n_slots = lane->limit = shared->max_inflight;
  lane->slots = calloc(lane->n_slots, sizeof(*lane->slots));
  lane->tokens = calloc(lane->n_slots + SPARE, sizeof(*lane->tokens));
  lane->stat = kvio_stats_acquire(shared);
  int rc = lane->slots && lane->tokens && lane->stat ? 0 : -ENOMEM;
  for (uint32_t i = 0; rc == 0 && i < lane->n_slots; i++)
    lane->slots[i].next_free = i + 1;
  for (uint32_t m = 0; m < shared->n_members; m++)
    for (int d = 0; d < 2; d++)
      lane->members[m].tail[d] = &lane->members[m].head[d];
  if (rc) {
    kvio_lane_destroy(lane);
    return rc;
  }
  *out = lane;
  return 0;
}

int kvio_lane_open_ring(struct kvio_lane *lane, bool own_thread)
{
  const struct kvio_shared *shared = lane->shared;
  struct kvio_ring_opts opts = {.entries = lane->n_slots + SPARE,
                                .own_thread = own_thread,
                                .big = shared->passthrough,
                                .iopoll = shared->iopoll,
                                .sqpoll = shared->sqpoll};
  int rc = kvio_ring_create(&lane->ring, &opts);
  memset(&lane->view, 0, sizeof(lane->view));
  if (rc || own_thread)
    return rc;
  rc = kvio_lane_enable(lane);
  if (rc)
    kvio_lane_close_ring(lane);
  return rc;
}

int kvio_lane_enable(struct kvio_lane *lane)
{
  int rc = kvio_ring_enable(lane->ring);
  if (rc)
    return rc;
  int fds[KVIO_MAX_MEMBERS];
  for (uint32_t m = 0; m < lane->shared->n_members; m++)
    fds[m] = lane->shared->members[m].dev.fd;
  kvio_ring_set_files(lane->ring, fds, lane->shared->n_members);
  return 0;
}

void kvio_lane_close_ring(struct kvio_lane *lane)
{
  if (!lane->ring)
    return;
  int fd = kvio_ring_destroy(lane->ring);
  lane->ring = NULL;
  lane->wake_armed = false;
  if (fd >= 0)
    kvio_quarantine_empty(lane->shared, fd);
}

void kvio_lane_destroy(struct kvio_lane *lane)
{
  kvio_lane_close_ring(lane);
  if (lane->stat)
    kvio_stats_release(lane->shared, lane->stat);
  free(lane->slots);
  free(lane->tokens);
  free(lane);
}

struct kvio_stat_block *kvio_lane_stat(struct kvio_lane *lane)
{
  return lane->stat;
}

struct kvio_ring *kvio_lane_ring(struct kvio_lane *lane)
{
  return lane->ring;
}

uint32_t kvio_lane_in_flight(const struct kvio_lane *lane)
{
  return lane->in_flight;
}

uint32_t kvio_lane_queued(const struct kvio_lane *lane)
{
  return lane->queued[0] + lane->queued[1];
}

bool kvio_lane_dead(const struct kvio_lane *lane)
{
  return lane->dead != 0;
}

void kvio_lane_watch(struct kvio_lane *lane, int event_fd)
{
  lane->event_fd = event_fd;
}

void kvio_lane_enqueue(struct kvio_lane *lane, struct kvio_seg *list)
{
  while (list) {
    struct kvio_seg *seg = list;
    struct lane_member *member = &lane->members[seg->member];
    list = seg->next;
    seg->next = NULL;
    *member->tail[seg->opcode] = seg;
    member->tail[seg->opcode] = &seg->next;
    lane->queued[seg->opcode]++;
  }
}

static void requeue_first(struct kvio_lane *lane, struct kvio_seg *seg)
{
  struct lane_member *member = &lane->members[seg->member];
  seg->next = member->head[seg->opcode];
  member->head[seg->opcode] = seg;
  if (!seg->next)
    member->tail[seg->opcode] = &seg->next;
  lane->queued[seg->opcode]++;
}

static struct kvio_seg *pop(struct kvio_lane *lane, struct lane_member *member, int dir)
{
  struct kvio_seg *seg = member->head[dir];
  member->head[dir] = seg->next;
  if (!seg->next)
    member->tail[dir] = &member->head[dir];
  seg->next = NULL;
  lane->queued[dir]--;
  return seg;
}

/* The next segment of a member that may go out now, or NULL (A3, A4). */
static struct kvio_seg *pick(struct kvio_lane *lane, struct lane_member *member)
{
  struct kvio_shared *shared = lane->shared;
  if (member->in_flight >= shared->queue_depth)
    return NULL;
  bool reads_about = lane->queued[KVIO_READ] > 0 ||
                     atomic_load_explicit(&shared->active_reads, memory_order_relaxed) > 0;
  uint32_t write_room = reads_about ? kvio_max_u64(lane->limit / 4, 1) : lane->limit;
  bool can_write = member->head[KVIO_WRITE] && lane->writes_in_flight < write_room;
  int dir;
  if (member->head[KVIO_READ] && !(can_write && lane->streak >= STREAK))
    dir = KVIO_READ;
  else if (can_write)
    dir = KVIO_WRITE;
  else
    return NULL;
  const struct kvio_seg *seg = member->head[dir];
  if (shared->max_inflight_bytes && lane->in_flight > 0 &&
      lane->bytes_in_flight + seg->length > shared->max_inflight_bytes)
    return NULL;
  lane->streak = dir == KVIO_READ ? lane->streak + 1 : 0;
  return pop(lane, member, dir);
}

static void finish_seg(struct kvio_lane *lane, struct kvio_seg *seg, int code, uint64_t now)
{
  if (seg->batch == lane->running)
    lane->running_left--;
  kvio_seg_complete(seg, code, now, lane->stat);
}

static bool prepare(struct kvio_lane *lane, struct kvio_seg *seg, uint64_t token)
{
  struct kvio_shared *shared = lane->shared;
  const struct kvio_device *dev = &shared->members[seg->member].dev;
  bool write = seg->opcode == KVIO_WRITE;
  uint32_t left = kvio_seg_left(seg);
  uint64_t offset = kvio_seg_offset(seg);
  int buffer = seg->n_iov == 1 ? kvio_view_find(&lane->view, seg->addr, left) : -1;
  kvio_count(buffer >= 0 ? &lane->stat->fixed_ops : &lane->stat->unfixed_ops, 1);
  if (dev->kind == KVIO_DEVICE_NVME_CHAR) {
    struct kvio_nvme_cmd cmd;
    if (seg->n_iov == 1)
      kvio_nvme_build_rw(&cmd, write, dev->nsid, dev->lba_shift, offset, left, seg->addr);
    else
      kvio_nvme_build_rwv(&cmd, write, dev->nsid, dev->lba_shift, offset, left, seg->iov,
                          seg->n_iov);
    return kvio_ring_prep_cmd(lane->ring, seg->member,
                              seg->n_iov == 1 ? KVIO_NVME_URING_CMD_IO : KVIO_NVME_URING_CMD_IO_VEC,
                              &cmd, sizeof(cmd), buffer, token);
  }
  if (seg->n_iov == 1)
    return kvio_ring_prep_rw(lane->ring, write, seg->member, seg->addr, left, offset, buffer,
                             token);
  return kvio_ring_prep_rwv(lane->ring, write, seg->member, seg->iov, seg->n_iov, offset, token);
}

static void in_flight_add(struct kvio_lane *lane, const struct kvio_seg *seg, int sign)
{
  lane->in_flight += (uint32_t)sign;
  lane->members[seg->member].in_flight += (uint32_t)sign;
  lane->writes_in_flight += seg->opcode == KVIO_WRITE ? (uint32_t)sign : 0;
  lane->bytes_in_flight += (uint64_t)((int64_t)seg->length * sign);
  atomic_store_explicit(&lane->stat->member[seg->member].in_flight,
                        lane->members[seg->member].in_flight, memory_order_relaxed);
}

static void issue_one(struct kvio_lane *lane, struct kvio_seg *seg, uint64_t now)
{
  if (KVIO_UNLIKELY(!kvio_batch_running(seg->batch))) {
    finish_seg(lane, seg, -ECANCELED, now);
    return;
  }
  uint32_t index = lane->free_slot;
  struct slot *slot = &lane->slots[index];
  if (!prepare(lane, seg, (uint64_t)slot->generation << 32 | index)) {
    requeue_first(lane, seg);
    return;
  }
  lane->free_slot = slot->next_free;
  slot->seg = seg;
  if (seg->t_issue == 0)
    seg->t_issue = now;
  in_flight_add(lane, seg, 1);
}

static void issue(struct kvio_lane *lane)
{
  if (KVIO_UNLIKELY(kvio_view_stale(&lane->view, &lane->shared->registry)))
    kvio_view_sync(&lane->view, &lane->shared->registry, lane->ring);
  uint64_t now = kvio_lane_queued(lane) > 0 ? kvio_now_ns() : 0;
  uint32_t n = lane->shared->n_members;
  uint32_t idle = 0;
  while (kvio_lane_queued(lane) > 0 && lane->in_flight < lane->limit && idle < n) {
    struct kvio_seg *seg = pick(lane, &lane->members[lane->next_member]);
    if (seg) {
      issue_one(lane, seg, now);
      idle = 0;
    } else {
      idle++;
    }
    lane->next_member = lane->next_member + 1 == n ? 0 : lane->next_member + 1;
  }
  if (lane->event_fd >= 0 && !lane->wake_armed)
    lane->wake_armed =
        kvio_ring_prep_wake(lane->ring, lane->event_fd, &lane->wake_value, TOKEN_WAKE);
}

static struct kvio_seg *free_slot(struct kvio_lane *lane, uint64_t token)
{
  uint32_t index = (uint32_t)token;
  if (index >= lane->n_slots || lane->slots[index].generation != token >> 32 ||
      !lane->slots[index].seg) {
    kvio_count(&lane->stat->stale_completions, 1);
    return NULL;
  }
  struct slot *slot = &lane->slots[index];
  struct kvio_seg *seg = slot->seg;
  slot->seg = NULL;
  slot->generation++;
  slot->next_free = lane->free_slot;
  lane->free_slot = index;
  in_flight_add(lane, seg, -1);
  return seg;
}

static void take_completion(struct kvio_lane *lane, const struct kvio_completion *done,
                            uint64_t now)
{
  if (done->token == TOKEN_WAKE) {
    lane->wake_armed = false;
    return;
  }
  struct kvio_seg *seg = free_slot(lane, done->token);
  if (!seg)
    return;
  lane->service_ns =
      kvio_min_u64(now - seg->t_issue, lane->service_ns + (lane->service_ns >> 4) + 1);
  int64_t result = done->res;
  if (lane->shared->members[seg->member].dev.kind == KVIO_DEVICE_NVME_CHAR)
    result = kvio_nvme_result(done->res, kvio_seg_left(seg));
  int code;
  switch (kvio_seg_advance(seg, result, &code, lane->stat)) {
  case KVIO_TRANSFER_DONE:
    if (lane->limit < lane->n_slots)
      lane->limit++;
    finish_seg(lane, seg, code, now);
    break;
  case KVIO_TRANSFER_RETRY:
    if (result == -ENOMEM) {
      lane->limit = (uint32_t)kvio_max_u64(lane->limit / 2, 1);
      lane->backoff = true;
    }
    requeue_first(lane, seg);
    break;
  case KVIO_TRANSFER_MORE:
    requeue_first(lane, seg);
    break;
  }
}

static uint32_t reap(struct kvio_lane *lane)
{
  struct kvio_completion done[REAP];
  uint32_t n, all = 0;
  do {
    n = kvio_ring_reap(lane->ring, done, REAP);
    uint64_t now = n > 0 ? kvio_now_ns() : 0;
    for (uint32_t i = 0; i < n; i++)
      take_completion(lane, &done[i], now);
    all += n;
  } while (n == REAP);
  return all;
}

/* A5: fails what the kernel did not take. */
static void drain_unsubmitted(struct kvio_lane *lane, int code)
{
  kvio_count(&lane->stat->poisoned_rings, 1);
  uint64_t *tokens = lane->tokens;
  uint32_t n = kvio_ring_take_unsubmitted(lane->ring, tokens, lane->n_slots + SPARE);
  uint64_t now = kvio_now_ns();
  for (uint32_t i = 0; i < n; i++) {
    if (tokens[i] == TOKEN_WAKE) {
      lane->wake_armed = false;
      continue;
    }
    struct kvio_seg *seg = free_slot(lane, tokens[i]);
    if (seg)
      finish_seg(lane, seg, code, now);
  }
}

static void drop_queued(struct kvio_lane *lane, int code)
{
  uint64_t now = kvio_now_ns();
  for (uint32_t m = 0; m < lane->shared->n_members; m++)
    for (int d = 0; d < 2; d++)
      while (lane->members[m].head[d])
        finish_seg(lane, pop(lane, &lane->members[m], d), code, now);
}

int kvio_lane_retire(struct kvio_lane *lane)
{
  drop_queued(lane, -ECANCELED);
  if (!lane->ring)
    return 0;
  struct kvio_remains *remains = malloc(sizeof(*remains));
  if (!remains)
    return -ENOMEM;
  int fd = kvio_ring_close(lane->ring);
  if (fd < 0) {
    free(remains);
    return fd;
  }
  lane->ring = NULL;
  lane->wake_armed = false;
  *remains = (struct kvio_remains){.end_fd = fd};
  for (uint32_t i = 0; i < lane->n_slots; i++) {
    struct slot *slot = &lane->slots[i];
    if (!slot->seg)
      continue;
    struct kvio_seg *seg = free_slot(lane, (uint64_t)slot->generation << 32 | i);
    seg->next = remains->segs;
    remains->segs = seg;
    remains->n++;
  }
  kvio_quarantine_add(lane->shared, remains);
  return 0;
}

void kvio_lane_abandon(struct kvio_lane *lane, int code)
{
  lane->dead = code;
  for (uint32_t i = 0; i < lane->n_slots; i++)
    if (lane->slots[i].seg)
      kvio_batch_expire(lane->slots[i].seg->batch, code);
  drop_queued(lane, code);
  kvio_lane_retire(lane);
}

static int submit_and_reap(struct kvio_lane *lane, uint32_t wait_nr, uint64_t timeout_ns)
{
  wait_nr = kvio_min_u64(wait_nr, lane->in_flight + lane->wake_armed);
  if (lane->in_flight == 0 && !lane->wake_armed)
    return 0;
  int rc = kvio_ring_submit_wait(lane->ring, wait_nr, timeout_ns);
  if (KVIO_UNLIKELY(rc != 0 && rc != -ETIME && rc != -EINTR)) {
    drain_unsubmitted(lane, rc);
    if (++lane->failed_enters >= DEAD_AFTER) {
      kvio_lane_abandon(lane, rc);
      return rc;
    }
  } else {
    lane->failed_enters = 0;
  }
  bool none = reap(lane) == 0;
  if (!none || wait_nr > 1)
    lane->lone = none;
  return rc;
}

/* Issues what may go out; 0, or why the lane is dead. */
static int begin_step(struct kvio_lane *lane)
{
  if (KVIO_UNLIKELY(lane->dead)) {
    drop_queued(lane, lane->dead);
    return lane->dead;
  }
  if (lane->backoff) {
    struct timespec nap = {0, BACKOFF_NS};
    nanosleep(&nap, NULL);
    lane->backoff = false;
  }
  issue(lane);
  return 0;
}

int kvio_lane_step(struct kvio_lane *lane, uint32_t wait_nr, uint64_t timeout_ns)
{
  int rc = begin_step(lane);
  return rc ? rc : submit_and_reap(lane, wait_nr, timeout_ns);
}

bool kvio_lane_group(const struct kvio_lane *lane, uint32_t *wait_nr, uint64_t *timeout_ns)
{
  if (lane->lone || lane->in_flight < 2 * GROUP_PART)
    return false;
  /* By Little's law this part of what is in flight comes within the same part of a service time;
   * twice that is waited for. */
  *wait_nr = (uint32_t)kvio_min_u64(lane->in_flight / GROUP_PART, GROUP_MAX);
  *timeout_ns = kvio_min_u64(lane->service_ns / 2, GROUP_NS);
  return true;
}

/* With nothing left to send all of the batch is waited for. Refilling in groups saves system
 * calls; a quarter keeps the depth above three quarters. */
static uint32_t group_size(const struct kvio_lane *lane)
{
  if (kvio_lane_queued(lane) == 0)
    return lane->running_left;
  uint32_t want = lane->shared->submit_batch;
  if (want == 0)
    want = (uint32_t)kvio_min_u64(kvio_max_u64(lane->limit / 4, 1), 32);
  return (uint32_t)kvio_max_u64(kvio_min_u64(want, lane->running_left), 1);
}

int kvio_lane_run(struct kvio_lane *lane, struct kvio_batch *batch, uint32_t n_segs,
                  kvio_interrupt_fn interrupt, void *interrupt_arg)
{
  uint64_t tick = interrupt ? INTERRUPT_TICK_NS : UINT64_MAX;
  int grace = 0;
  lane->running = batch;
  lane->running_left = n_segs;
  while (lane->running_left > 0) {
    int rc = begin_step(lane);
    if (KVIO_LIKELY(rc == 0))
      rc = submit_and_reap(lane, group_size(lane), tick);
    if (KVIO_UNLIKELY(lane->dead))
      break;
    if (KVIO_LIKELY(!interrupt || (rc != -ETIME && rc != -EINTR)))
      continue;
    if (grace == 0 && interrupt(interrupt_arg) == 0)
      continue;
    /* What was not sent is dropped; what was sent normally comes within milliseconds. */
    kvio_batch_expire(batch, -EINTR);
    if (++grace > GRACE_TICKS)
      break;
  }
  lane->running = NULL;
  return grace > 0 ? -EINTR : 0;
}
