/* SPDX-License-Identifier: Apache-2.0
 *
 * The way in: ops are checked, placed on the members and cut into segments.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"

enum { MAX_IOV = 1024 }; /* UIO_MAXIOV of the kernel */

struct cut {
  struct kvio_shared *shared;
  struct kvio_batch *batch;
  enum kvio_opcode opcode;
  uint32_t n_segs, n_iovs, n_threads;
};

struct limits {
  uint64_t size;
  uint32_t align, mem_align;
};

static struct limits limits_of(const struct kvio_shared *shared, const struct kvio_op *op,
                               enum kvio_opcode opcode)
{
  bool write = opcode == KVIO_WRITE || opcode == KVIO_DISCARD;
  if (op->member == KVIO_STRIPED)
    return (struct limits){shared->layout.size_bytes,
                           write ? shared->write_align : shared->read_align, shared->mem_align};
  const struct kvio_device *dev = &shared->members[op->member].dev;
  return (struct limits){dev->size_bytes, write ? dev->write_align : dev->offset_align,
                         dev->mem_align};
}

/* Bytes of the op's buffers; UINT64_MAX when they are too many for an offset. */
static inline uint64_t op_length(const struct kvio_op *op)
{
  if (KVIO_LIKELY(op->iovcnt == 1))
    return op->iov->iov_len <= INT64_MAX ? op->iov->iov_len : UINT64_MAX;
  uint64_t length = 0;
  for (uint32_t i = 0; i < op->iovcnt; i++)
    if (__builtin_add_overflow(length, (uint64_t)op->iov[i].iov_len, &length) || length > INT64_MAX)
      return UINT64_MAX;
  return length;
}

static bool memory_aligned(const struct kvio_op *op, const struct limits *lim)
{
  uintptr_t bits = 0;
  uint64_t lengths = 0;
  for (uint32_t i = 0; i < op->iovcnt; i++) {
    bits |= (uintptr_t)op->iov[i].iov_base;
    lengths |= op->iov[i].iov_len;
  }
  return (bits & (lim->mem_align - 1)) == 0 && (lengths & (lim->align - 1)) == 0;
}

/* Most segments that an op can become. */
static uint64_t seg_bound(const struct kvio_shared *shared, const struct kvio_op *op,
                          uint64_t length)
{
  uint64_t unit = shared->smallest_cut;
  if (length <= unit && op->iovcnt <= MAX_IOV && op->member == KVIO_STRIPED &&
      op->offset / unit == (op->offset + length - 1) / unit)
    return 1;
  return length / unit + 3 + shared->layout.n_zones + op->iovcnt / MAX_IOV;
}

static int refuse(struct kvio_error *err, int code, uint32_t i, const struct kvio_op *op,
                  uint64_t length, enum kvio_opcode opcode, const char *why)
{
  kvio_error_set(err, code, "operation %u (offset %llu, %llu bytes): %s", i,
                 (unsigned long long)op->offset, (unsigned long long)length, why);
  if (err) {
    err->member = op->member;
    err->offset = op->offset;
    err->length = length;
    err->op = opcode;
  }
  return code;
}

/* Checks op i at the door. *length is clipped at the end of the volume, *bounce says how. */
static int check_op(const struct cut *cut, const struct kvio_op *op, uint32_t i, uint64_t asked,
                    uint64_t *length, int *refused, bool *bounce, struct kvio_error *err)
{
  const struct kvio_shared *shared = cut->shared;
  *refused = 0;
  *bounce = false;
  if (op->member != KVIO_STRIPED && (op->member < 0 || (uint32_t)op->member >= shared->n_members))
    return refuse(err, -EINVAL, i, op, 0, cut->opcode, "there is no such member");
  if (cut->opcode == KVIO_FLUSH)
    return 0;
  struct limits lim = limits_of(shared, op, cut->opcode);
  *length = asked;
  if (*length == UINT64_MAX || op->offset > INT64_MAX || *length > INT64_MAX - op->offset)
    return refuse(err, -EINVAL, i, op, *length, cut->opcode, "beyond 2^63 - 1 bytes");
  if (op->offset >= lim.size || *length > lim.size - op->offset) {
    if (cut->opcode != KVIO_READ && *length > 0)
      *refused = -ENOSPC;
    *length = op->offset >= lim.size ? 0 : lim.size - op->offset;
  }
  if (*length == 0 || *refused)
    return 0;
  bool range = ((op->offset | asked) & (lim.align - 1)) == 0;
  if (cut->opcode == KVIO_DISCARD)
    return range ? 0
                 : refuse(err, -EINVAL, i, op, *length, cut->opcode,
                          "offset and length of a discard must be multiples of the alignment");
  if (range && memory_aligned(op, &lim))
    return 0;
  if (shared->unaligned == KVIO_UNALIGNED_REFUSE)
    return refuse(err, -EINVAL, i, op, *length, cut->opcode,
                  "not aligned (offset, length and buffer addresses must be multiples of "
                  "vol.alignment), and this volume was opened with unaligned='refuse'");
  if (!range && cut->opcode == KVIO_WRITE)
    return refuse(err, -EINVAL, i, op, *length, cut->opcode,
                  "offset and length of a write must be multiples of vol.alignment: a part of a "
                  "block cannot be written without a race");
  *bounce = true;
  return 0;
}

static bool for_threads(const struct kvio_shared *shared, const struct kvio_seg *seg)
{
  return seg->opcode > KVIO_WRITE || shared->members[seg->member].engine == KVIO_ENGINE_THREADS;
}

static struct kvio_seg *new_seg(struct cut *cut, struct kvio_op_state *state, uint32_t op,
                                uint32_t member, uint64_t offset, uint64_t length)
{
  struct kvio_seg *seg = &cut->batch->segs[cut->n_segs++];
  const struct kvio_member *target = &cut->shared->members[member];
  KVIO_ASSERT(cut->n_segs <= cut->batch->n_segs);
  KVIO_ASSERT(cut->opcode > KVIO_WRITE || offset < target->dev.size_bytes);
  seg->next = NULL;
  seg->batch = cut->batch;
  seg->offset = offset;
  seg->length = length;
  seg->t_issue = seg->t_done = 0;
  seg->addr = NULL;
  seg->op = op;
  seg->done = seg->tail = 0;
  atomic_init(&seg->res, KVIO_SEG_PENDING);
  seg->member = (uint16_t)member;
  seg->n_iov = 1;
  seg->opcode = (uint8_t)cut->opcode;
  seg->retries = 0;
  state->n_segs++;
  cut->n_threads += for_threads(cut->shared, seg);
  return seg;
}

struct cursor {
  const struct iovec *iov;
  uint32_t left; /* iovecs, with the current one */
  uint64_t used; /* bytes of the current one */
};

/* Gives the segment its memory from the cursor, at most MAX_IOV pieces; returns the bytes. */
static uint64_t take_memory(struct cut *cut, struct kvio_seg *seg, struct cursor *cur,
                            uint64_t want)
{
  while (cur->used == cur->iov->iov_len && cur->left > 1) {
    cur->iov++;
    cur->left--;
    cur->used = 0;
  }
  uint64_t here = cur->iov->iov_len - cur->used;
  if (here >= want) {
    seg->addr = (char *)cur->iov->iov_base + cur->used;
    cur->used += want;
    return want;
  }
  struct iovec *pieces = &cut->batch->iovs[cut->n_iovs];
  uint64_t got = 0;
  uint32_t n = 0;
  while (got < want && n < MAX_IOV) {
    here = kvio_min_u64(cur->iov->iov_len - cur->used, want - got);
    if (here > 0) {
      pieces[n++] = (struct iovec){(char *)cur->iov->iov_base + cur->used, here};
      got += here;
      cur->used += here;
    }
    if (got == want || n == MAX_IOV)
      break;
    KVIO_ASSERT(cur->left > 1);
    cur->iov++;
    cur->left--;
    cur->used = 0;
  }
  cut->n_iovs += n;
  seg->n_iov = (uint16_t)n;
  if (n == 1)
    seg->addr = pieces[0].iov_base;
  else
    seg->iov = pieces;
  return got;
}

static bool in_huge_pages(const struct kvio_shared *shared, const struct cursor *cur)
{
  if (!kvio_registry_has_huge(&shared->registry))
    return false;
  for (uint32_t i = 0; i < cur->left; i++)
    if (!kvio_registry_is_huge(&shared->registry, cur->iov[i].iov_base, cur->iov[i].iov_len))
      return false;
  return true;
}

static void cut_range(struct cut *cut, uint32_t i, struct kvio_op_state *state, uint64_t offset,
                      uint64_t length, struct cursor cur, uint32_t align)
{
  const struct kvio_shared *shared = cut->shared;
  bool huge = length > shared->smallest_cut && in_huge_pages(shared, &cur);
  while (length > 0) {
    struct kvio_piece piece = {(uint32_t)state->member, offset, length};
    if (state->member == KVIO_STRIPED)
      piece = kvio_layout_map(&shared->layout, offset, length);
    const struct kvio_member *target = &shared->members[piece.member];
    uint64_t take = kvio_min_u64(piece.length, huge ? target->chunk_bytes : target->small_chunk);
    struct kvio_seg *seg = new_seg(cut, state, i, piece.member, piece.offset, take);
    take = take_memory(cut, seg, &cur, take);
    /* Only the tail of a lone member can be unaligned here. The command asks for the whole block:
     * the buffer has room, since its own length is aligned. */
    seg->length = take == length ? kvio_align_up(take, align) : take;
    if (seg->length > take && seg->n_iov > 1)
      seg->iov[seg->n_iov - 1].iov_len += seg->length - take;
    offset += take;
    length -= take;
  }
}

static int cut_bounced(struct cut *cut, uint32_t i, struct kvio_op_state *state,
                       const struct kvio_op *op, const struct limits *lim)
{
  uint64_t start = kvio_align_down(op->offset, lim->align);
  uint64_t end = kvio_align_up(op->offset + state->length, lim->align);
  size_t size = end - start;
  size_t align = kvio_max_u64(lim->mem_align, 4096);
  state->bounce = aligned_alloc(align, kvio_align_up(size, align));
  if (!state->bounce)
    return -ENOMEM;
  state->head = (uint32_t)(op->offset - start);
  state->iov = cut->n_iovs;
  state->n_iov = op->iovcnt;
  memcpy(&cut->batch->iovs[cut->n_iovs], op->iov, op->iovcnt * sizeof(*op->iov));
  cut->n_iovs += op->iovcnt;
  if (cut->opcode == KVIO_WRITE) {
    char *to = state->bounce;
    for (uint32_t k = 0; k < op->iovcnt; k++) {
      memcpy(to, op->iov[k].iov_base, op->iov[k].iov_len);
      to += op->iov[k].iov_len;
    }
  }
  struct iovec whole = {state->bounce, size};
  struct cursor cur = {&whole, 1, 0};
  cut_range(cut, i, state, start, kvio_min_u64(end, lim->size) - start, cur, lim->align);
  return 0;
}

static void cut_control(struct cut *cut, uint32_t i, struct kvio_op_state *state,
                        const struct kvio_op *op)
{
  const struct kvio_shared *shared = cut->shared;
  if (cut->opcode == KVIO_FLUSH) {
    for (uint32_t m = 0; m < shared->n_members; m++)
      if (op->member == KVIO_STRIPED || (uint32_t)op->member == m)
        new_seg(cut, state, i, m, 0, 0);
    return;
  }
  /* What a range takes of a member is contiguous within a zone: one command each. */
  struct kvio_seg *open[KVIO_MAX_MEMBERS] = {NULL};
  uint64_t offset = op->offset, length = state->length;
  while (length > 0) {
    struct kvio_piece piece = {(uint32_t)op->member, offset, length};
    if (op->member == KVIO_STRIPED)
      piece = kvio_layout_map(&shared->layout, offset, length);
    struct kvio_seg *last = open[piece.member];
    if (last && last->offset + last->length == piece.offset)
      last->length += piece.length;
    else
      open[piece.member] = new_seg(cut, state, i, piece.member, piece.offset, piece.length);
    offset += piece.length;
    length -= piece.length;
  }
}

static int cut_op(struct cut *cut, const struct kvio_op *op, uint32_t i, struct kvio_error *err)
{
  struct kvio_op_state *state = &cut->batch->ops[i];
  bool bounce;
  *state =
      (struct kvio_op_state){.offset = op->offset, .member = op->member, .first_seg = cut->n_segs};
  state->asked = op_length(op);
  int rc = check_op(cut, op, i, state->asked, &state->length, &state->refused, &bounce, err);
  if (rc)
    return rc;
  if (state->refused)
    return 0;
  if (cut->opcode > KVIO_WRITE) {
    cut_control(cut, i, state, op);
    return 0;
  }
  if (state->length == 0)
    return 0;
  struct limits lim = limits_of(cut->shared, op, cut->opcode);
  if (bounce) {
    rc = cut_bounced(cut, i, state, op, &lim);
    return rc ? refuse(err, rc, i, op, state->length, cut->opcode,
                       "no memory for a bounce buffer; align the caller's buffers")
              : 0;
  }
  struct cursor cur = {op->iov, op->iovcnt, 0};
  cut_range(cut, i, state, op->offset, state->length, cur, lim.align);
  return 0;
}

static void *take_block(struct kvio_shared *shared, size_t *bytes)
{
  uint32_t start = (uint32_t)((uintptr_t)__builtin_frame_address(0) >> 16);
  for (uint32_t i = 0; i < 4; i++) {
    /* acquire: pairs with the release in kvio_block_give */
    size_t *block = atomic_exchange_explicit(&shared->blocks[(start + i) % KVIO_BLOCK_POOL], NULL,
                                             memory_order_acq_rel);
    if (!block)
      continue;
    if (*block >= *bytes) {
      *bytes = *block;
      return block;
    }
    free(block);
  }
  return malloc(*bytes);
}

/* Sizes and lays out the memory of a batch. */
static int allocate(struct cut *cut, const struct kvio_op *ops, uint32_t n_ops)
{
  struct kvio_shared *shared = cut->shared;
  uint64_t segs = 0, iovs = 0;
  for (uint32_t i = 0; i < n_ops; i++) {
    uint64_t length = op_length(&ops[i]);
    if (cut->opcode <= KVIO_WRITE && length > shared->layout.size_bytes + (UINT64_C(1) << 32))
      length = shared->layout.size_bytes + (UINT64_C(1) << 32);
    uint64_t bound = cut->opcode > KVIO_WRITE ? (uint64_t)shared->n_members * shared->layout.n_zones
                                              : seg_bound(shared, &ops[i], length);
    segs += bound;
    iovs += ops[i].iovcnt > 1 ? ops[i].iovcnt + bound : 1;
  }
  if (segs > INT32_MAX || iovs > INT32_MAX)
    return -E2BIG;
  size_t head =
      kvio_align_up(sizeof(struct kvio_batch) + shared->n_workers * sizeof(struct kvio_shard), 64);
  size_t bytes = head + n_ops * sizeof(struct kvio_op_state) + segs * sizeof(struct kvio_seg) +
                 iovs * sizeof(struct iovec);
  bytes = bytes < 4096 ? 4096 : kvio_align_up(bytes, 4096);
  struct kvio_batch *batch = take_block(shared, &bytes);
  if (!batch)
    return -ENOMEM;
  memset(batch, 0, head);
  char *at = (char *)batch + head;
  batch->block_bytes = bytes;
  batch->segs = (struct kvio_seg *)at;
  at += segs * sizeof(struct kvio_seg);
  batch->ops = (struct kvio_op_state *)at;
  at += n_ops * sizeof(struct kvio_op_state);
  batch->iovs = (struct iovec *)at;
  batch->n_segs = (uint32_t)segs;
  batch->n_ops = n_ops;
  cut->batch = batch;
  return 0;
}

/* Links the ring segments into one list a worker, the others into the job of the I/O threads. */
static void deal_shards(struct kvio_batch *batch)
{
  struct kvio_shared *shared = batch->shared;
  struct kvio_seg **tails[KVIO_MAX_MEMBERS], **job = &batch->job;
  for (uint32_t w = 0; w < shared->n_workers; w++) {
    batch->shards[w].batch = batch;
    tails[w] = &batch->shards[w].segs;
  }
  for (uint32_t i = 0; i < batch->n_segs; i++) {
    struct kvio_seg *seg = &batch->segs[i];
    if (for_threads(shared, seg)) {
      *job = seg;
      job = &seg->next;
      continue;
    }
    uint32_t w = seg->member % shared->n_workers;
    *tails[w] = seg;
    tails[w] = &seg->next;
  }
  batch->shards[0].runs_job = batch->n_job > 0;
}

int kvio_batch_create(struct kvio_batch **out, struct kvio_shared *shared, enum kvio_opcode opcode,
                      const struct kvio_op *ops, uint32_t n_ops, uint64_t deadline_ns, void *owner,
                      struct kvio_error *err)
{
  struct cut cut = {.shared = shared, .opcode = opcode};
  if (opcode != KVIO_READ && !shared->write)
    return opcode == KVIO_FLUSH ? kvio_error_set(err, -EBADF,
                                                 "the volume is open read-only, there "
                                                 "is nothing to flush")
                                : kvio_error_set(err, -EBADF,
                                                 "the volume is open read-only: open "
                                                 "it with mode='rw' to write");
  int rc = allocate(&cut, ops, n_ops);
  if (rc)
    return kvio_error_set(err, rc, "no memory for a batch of %u operations; use smaller batches",
                          n_ops);
  struct kvio_batch *batch = cut.batch;
  batch->shared = shared;
  batch->opcode = opcode;
  atomic_init(&batch->event_fd, -1);
  atomic_init(&batch->refs, 1);
  for (uint32_t i = 0; i < n_ops && rc == 0; i++) {
    rc = cut_op(&cut, &ops[i], i, err);
    batch->n_ops = i + 1;
  }
  batch->n_segs = cut.n_segs;
  batch->n_job = cut.n_threads;
  batch->n_ring_segs = cut.n_segs - cut.n_threads;
  if (rc) {
    kvio_batch_put(batch);
    return rc;
  }
  batch->n_ops = n_ops;
  deal_shards(batch);
  atomic_init(&batch->pending, batch->n_segs);
  atomic_init(&batch->owner, owner);
  batch->t_start = kvio_now_ns();
  if (deadline_ns != KVIO_NO_DEADLINE &&
      __builtin_add_overflow(batch->t_start, deadline_ns, &batch->deadline))
    batch->deadline = 0;
  *out = batch;
  return 0;
}
