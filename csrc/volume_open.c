/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening a volume: options are checked, members opened and compared, geometry is worked out,
 * every member is probed with a real read.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>

#include "volume.h"

enum {
  MAX_DEPTH = 4096,
  DEFAULT_DEPTH = 64,
  DEFAULT_IO_THREADS = 16,
  MAX_IO_THREADS = 1024,
  THREADS_CHUNK = 4 << 20,
};

void kvio_volume_opts_init(struct kvio_volume_opts *opts)
{
  *opts = (struct kvio_volume_opts){.stripe_unit = 1 << 20,
                                    .queue_depth = DEFAULT_DEPTH,
                                    .engine = KVIO_ENGINE_AUTO,
                                    .direct = KVIO_DIRECT_REQUIRE,
                                    .unaligned = KVIO_UNALIGNED_BOUNCE};
}

static int check_opts(const struct kvio_volume_opts *opts, struct kvio_error *err)
{
  if (opts->n_paths == 0 || opts->n_paths > KVIO_MAX_MEMBERS)
    return kvio_error_set(err, -EINVAL, "a volume has 1 to %d members, not %u", KVIO_MAX_MEMBERS,
                          opts->n_paths);
  if (!kvio_is_pow2(opts->stripe_unit) || opts->stripe_unit < 512 ||
      opts->stripe_unit > (UINT64_C(1) << 40))
    return kvio_error_set(err, -EINVAL,
                          "stripe_unit %llu: must be a power of two from 512 bytes to 1 TiB",
                          (unsigned long long)opts->stripe_unit);
  if (opts->queue_depth == 0 || opts->queue_depth > MAX_DEPTH || opts->max_inflight > MAX_DEPTH)
    return kvio_error_set(err, -EINVAL, "queue_depth %u, max_inflight %u: must be 1 to %d",
                          opts->queue_depth, opts->max_inflight, MAX_DEPTH);
  if (opts->io_threads > MAX_IO_THREADS || opts->workers > KVIO_MAX_MEMBERS)
    return kvio_error_set(err, -EINVAL, "io_threads at most %d, workers at most %d", MAX_IO_THREADS,
                          KVIO_MAX_MEMBERS);
  if (opts->engine == KVIO_ENGINE_THREADS && (opts->iopoll || opts->sqpoll))
    return kvio_error_set(err, -EINVAL, "iopoll and sqpoll need engine 'io_uring', not 'threads'");
  return 0;
}

static void set_limits(struct kvio_shared *shared, const struct kvio_volume_opts *opts)
{
  uint32_t n = opts->n_paths;
  shared->write = opts->write;
  shared->unaligned = opts->unaligned;
  shared->queue_depth = opts->queue_depth;
  shared->max_inflight = opts->max_inflight
                             ? opts->max_inflight
                             : (uint32_t)kvio_min_u64((uint64_t)opts->queue_depth * n, MAX_DEPTH);
  shared->max_inflight_bytes = opts->max_inflight_bytes;
  shared->submit_batch = opts->submit_batch;
  shared->deadline_ns = opts->deadline_ns;
  shared->io_threads = opts->io_threads ? opts->io_threads : DEFAULT_IO_THREADS;
  shared->iopoll = opts->iopoll;
  shared->sqpoll = opts->sqpoll;
  /* One worker drives several members without trouble; more pay only where processors are idle. */
  uint32_t processors = (uint32_t)get_nprocs();
  uint32_t workers = opts->workers;
  if (workers == 0)
    workers = (uint32_t)kvio_min_u64((n + 7) / 8, kvio_max_u64(processors / 2, 1));
  shared->n_workers = (uint32_t)kvio_min_u64(workers, n);
}

/* The volume's own claim of an earlier member would look like somebody else's. */
static int refuse_twice(const struct kvio_shared *shared, const char *path, uint32_t i,
                        struct kvio_error *err)
{
  struct stat st;
  if (stat(path, &st) != 0 || !S_ISBLK(st.st_mode))
    return 0;
  for (uint32_t k = 0; k < i; k++)
    if (shared->members[k].dev.kind == KVIO_DEVICE_BLOCK &&
        shared->members[k].dev.rdev == st.st_rdev)
      return kvio_error_set(err, -EEXIST, "%s and %s are the same storage: list each member once",
                            shared->members[k].dev.path, path);
  return 0;
}

static int open_member(struct kvio_volume *vol, const struct kvio_volume_opts *opts, uint32_t i,
                       struct kvio_error *err)
{
  struct kvio_shared *shared = &vol->shared;
  struct kvio_member *member = &shared->members[i];
  struct kvio_device_opts want = {.path = opts->paths[i],
                                  .write = opts->write,
                                  .direct = opts->direct,
                                  .allow_destroy = opts->allow_destroy};
  int rc = refuse_twice(shared, want.path, i, err);
  if (rc)
    return rc;
  rc = kvio_device_open(&member->dev, &want, err);
  if (rc) {
    member->dev.fd = -1;
    return rc;
  }
  for (uint32_t k = 0; k < i; k++)
    if (kvio_device_same(&shared->members[k].dev, &member->dev))
      return kvio_error_set(err, -EEXIST,
                            "%s and %s are the same storage (or overlap): list each member once",
                            shared->members[k].dev.path, member->dev.path);
  return 0;
}

static int set_geometry(struct kvio_volume *vol, const struct kvio_volume_opts *opts,
                        struct kvio_error *err)
{
  struct kvio_shared *shared = &vol->shared;
  uint64_t sizes[KVIO_MAX_MEMBERS];
  shared->read_align = shared->write_align = shared->mem_align = 1;
  shared->smallest_cut = opts->n_paths == 1 ? UINT64_MAX : opts->stripe_unit;
  for (uint32_t i = 0; i < opts->n_paths; i++) {
    const struct kvio_member *member = &shared->members[i];
    const struct kvio_device *dev = &member->dev;
    shared->read_align = (uint32_t)kvio_max_u64(shared->read_align, dev->offset_align);
    shared->write_align = (uint32_t)kvio_max_u64(shared->write_align, dev->write_align);
    shared->mem_align = (uint32_t)kvio_max_u64(shared->mem_align, dev->mem_align);
    shared->smallest_cut = kvio_min_u64(shared->smallest_cut, dev->max_io_small_pages);
    sizes[i] = dev->size_bytes;
  }
  shared->write_align = (uint32_t)kvio_max_u64(shared->write_align, shared->read_align);
  if (opts->n_paths > 1 && opts->stripe_unit % shared->write_align != 0)
    return kvio_error_set(err, -EINVAL,
                          "stripe_unit %llu is not a multiple of %u, the alignment of the members",
                          (unsigned long long)opts->stripe_unit, shared->write_align);
  int rc = kvio_layout_init(&shared->layout, sizes, opts->n_paths, opts->stripe_unit);
  if (rc == -ENOSPC) {
    for (uint32_t i = 0; i < opts->n_paths; i++)
      if (opts->n_paths == 1 ? sizes[i] == 0 : sizes[i] < opts->stripe_unit)
        return kvio_error_set(err, rc, "%s holds %llu bytes, less than one stripe unit (%llu)",
                              shared->members[i].dev.path, (unsigned long long)sizes[i],
                              (unsigned long long)opts->stripe_unit);
  }
  return rc ? kvio_error_set(err, rc, "the members are too large together for one volume") : 0;
}

int kvio_volume_open_members(struct kvio_volume *vol, const struct kvio_volume_opts *opts,
                             struct kvio_error *err)
{
  int rc = check_opts(opts, err);
  if (rc)
    return rc;
  set_limits(&vol->shared, opts);
  for (uint32_t i = 0; i < opts->n_paths; i++) {
    rc = open_member(vol, opts, i, err);
    if (rc) {
      if (err) {
        err->member = (int)i;
        err->op = KVIO_OPEN;
      }
      return rc;
    }
    vol->shared.passthrough |= vol->shared.members[i].dev.kind == KVIO_DEVICE_NVME_CHAR;
  }
  return set_geometry(vol, opts, err);
}

static int set_engine(struct kvio_member *member, enum kvio_engine engine, const char *reason)
{
  member->engine = engine;
  /* A ring's command is what the device takes without help. A preadv is split by the kernel, and
   * small commands would only cost a thread's turn each. */
  bool threads = engine == KVIO_ENGINE_THREADS;
  member->chunk_bytes = threads ? THREADS_CHUNK : member->dev.max_io_bytes;
  member->small_chunk = threads ? THREADS_CHUNK : member->dev.max_io_small_pages;
  snprintf(member->reason, sizeof(member->reason), "%s", reason);
  return 0;
}

/* Reads one block through the ring; bytes or -errno. */
static int64_t probe_read(struct kvio_volume *vol, uint32_t i)
{
  const struct kvio_device *dev = &vol->shared.members[i].dev;
  size_t size = kvio_max_u64(dev->offset_align, 512);
  void *buffer = aligned_alloc(4096, kvio_align_up(size, 4096));
  if (!buffer)
    return -ENOMEM;
  struct iovec iov = {buffer, kvio_min_u64(size, dev->size_bytes)};
  struct kvio_op op = {.iov = &iov, .iovcnt = 1, .member = (int32_t)i};
  struct kvio_caller *caller;
  struct kvio_batch *batch;
  int64_t result;
  int rc = kvio_caller_get(vol->callers, &caller);
  if (rc == 0)
    rc = kvio_batch_create(&batch, &vol->shared, KVIO_READ, &op, 1, 0, NULL, NULL);
  if (rc == 0) {
    kvio_batch_start(batch);
    for (uint32_t w = 0; w < vol->shared.n_workers; w++)
      kvio_lane_enqueue(caller->lane, batch->shards[w].segs);
    kvio_lane_run(caller->lane, batch, batch->n_ring_segs, NULL, NULL);
    kvio_batch_results(batch, &result);
    kvio_batch_put(batch);
  }
  free(buffer);
  return rc ? rc : result;
}

static int refuse_engine(struct kvio_error *err, const struct kvio_member *member, int code,
                         const char *what)
{
  /* A kernel without io_uring and one that forbids it are the same to the caller. */
  bool refused = code == -EPERM || code == -EACCES || code == -ENOSYS;
  return kvio_error_set(err, refused ? -EOPNOTSUPP : code, "%s: %s (%s)", member->dev.path, what,
                        strerror(-code));
}

static int pick_engine(struct kvio_volume *vol, uint32_t i, enum kvio_engine want,
                       struct kvio_error *err)
{
  struct kvio_shared *shared = &vol->shared;
  struct kvio_member *member = &shared->members[i];
  bool nvme_char = member->dev.kind == KVIO_DEVICE_NVME_CHAR;
  if (want == KVIO_ENGINE_URING_CMD && !nvme_char)
    return refuse_engine(err, member, -EINVAL,
                         "engine 'io_uring_cmd' needs the character device, /dev/ngXnY");
  if (want == KVIO_ENGINE_THREADS && nvme_char)
    return refuse_engine(err, member, -EINVAL, "an NVMe character device has no preadv");
  if (want == KVIO_ENGINE_THREADS)
    return set_engine(member, KVIO_ENGINE_THREADS, "asked for");
  char reason[160];
  if (!shared->uring_granted) {
    if (want != KVIO_ENGINE_AUTO || nvme_char)
      return refuse_engine(err, member, vol->uring_errno,
                           "io_uring is refused here; use engine='auto' or 'threads', and see "
                           "`kvio doctor` for the reason");
    snprintf(reason, sizeof(reason), "io_uring is refused: %s", strerror(-vol->uring_errno));
    return set_engine(member, KVIO_ENGINE_THREADS, reason);
  }
  if (want == KVIO_ENGINE_AUTO && !nvme_char && !member->dev.nowait_read)
    return set_engine(member, KVIO_ENGINE_THREADS,
                      "the kernel hands its reads to io-wq (RWF_NOWAIT refused): plain preadv "
                      "threads are faster");
  set_engine(member, nvme_char ? KVIO_ENGINE_URING_CMD : KVIO_ENGINE_URING, "");
  int64_t got = probe_read(vol, i);
  if (got > 0)
    return set_engine(member, member->engine,
                      nvme_char ? "passthrough: a probing read was served"
                                : "a probing read was served without io-wq");
  if (got == 0)
    got = -EIO;
  if (want != KVIO_ENGINE_AUTO || nvme_char || shared->iopoll)
    return refuse_engine(err, member, (int)got,
                         shared->iopoll ? "a polled read is refused: has the device poll queues "
                                          "(nvme.poll_queues)?"
                                        : "a probing read through io_uring failed");
  snprintf(reason, sizeof(reason), "a probing read through io_uring failed: %s",
           strerror((int)-got));
  return set_engine(member, KVIO_ENGINE_THREADS, reason);
}

int kvio_volume_pick_engines(struct kvio_volume *vol, const struct kvio_volume_opts *opts,
                             struct kvio_error *err)
{
  struct kvio_shared *shared = &vol->shared;
  struct kvio_caller *caller;
  int rc = kvio_caller_get(vol->callers, &caller);
  if (rc)
    return kvio_error_set(err, rc, "no memory for a lane");
  if (opts->engine != KVIO_ENGINE_THREADS) {
    vol->uring_errno = kvio_lane_open_ring(caller->lane, false);
    shared->uring_granted = vol->uring_errno == 0;
  }
  if (shared->uring_granted) {
    const struct kvio_ring_caps *caps = kvio_ring_caps(kvio_lane_ring(caller->lane));
    vol->ring_flags = caps->flags;
    vol->registered_files = caps->files;
    vol->registered_buffers = caps->buffers;
  } else if (shared->iopoll || shared->sqpoll) {
    return kvio_error_set(err, vol->uring_errno, "a ring with iopoll=%d, sqpoll=%d is refused: %s",
                          shared->iopoll, shared->sqpoll, strerror(-vol->uring_errno));
  }
  for (uint32_t i = 0; i < shared->n_members && rc == 0; i++) {
    rc = pick_engine(vol, i, opts->engine, err);
    if (rc && err) {
      err->member = (int)i;
      err->op = KVIO_OPEN;
    }
  }
  shared->smallest_cut = opts->n_paths == 1 ? UINT64_MAX : opts->stripe_unit;
  for (uint32_t i = 0; i < shared->n_members && rc == 0; i++)
    shared->smallest_cut =
        kvio_min_u64(shared->smallest_cut,
                     kvio_min_u64(shared->members[i].chunk_bytes, shared->members[i].small_chunk));
  kvio_stats_reset(shared);
  return rc;
}
