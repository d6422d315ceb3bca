/* SPDX-License-Identifier: Apache-2.0
 *
 * bufpool: memory for I/O. kvio_memory_map (kvio.h) maps it; a registry remembers which ranges are
 * registered, and each ring follows the registry.
 *
 * Invariants
 *   P1  A ring never uses a slot whose region was unregistered: before each batch it compares the
 *       registry's version with its own and updates its table first (kvio_view_sync).
 *   P2  A slot number is given to another region only with a higher version, so a ring that has
 *       not synced yet cannot mix them up.
 *   P3  A slice is at most 1 GiB (the kernel refuses more) and slices of a registry never overlap.
 */
#ifndef KVIO_BUFPOOL_H
#define KVIO_BUFPOOL_H

#include <pthread.h>

#include "ring.h"

#define KVIO_MAX_SLICES 64
#define KVIO_SLICE_BYTES (UINT64_C(1) << 30)

struct kvio_slice {
  uintptr_t start; /* 0 = free slot */
  size_t size_bytes;
  uintptr_t region; /* address given to kvio_registry_add, names the region */
  uint64_t version; /* registry version that put it here */
};

struct kvio_registry {
  pthread_mutex_t lock; /* taken by register, unregister and a ring that syncs; never per I/O */
  _Atomic uint64_t version;
  uint32_t n_regions;
  _Atomic int last_errno; /* of the last registration that a kernel refused */
  struct kvio_slice slices[KVIO_MAX_SLICES];
  /* Slices in huge pages, read without the lock: a hint for the size of commands, and a stale one
   * costs speed only. Places 0 to huge_top - 1 may be in use; end 0 = empty. */
  _Atomic uint32_t huge_top;
  struct {
    _Atomic uintptr_t start, end;
  } huge[KVIO_MAX_SLICES];
};

/* One ring's copy. sorted[] holds the slices that this ring has really registered. */
struct kvio_view {
  uint64_t version;
  uint32_t n;
  struct {
    uintptr_t start, end;
    int slot;
  } sorted[KVIO_MAX_SLICES];
  uint64_t slot_version[KVIO_MAX_SLICES]; /* 0 = empty in this ring */
};

void kvio_registry_init(struct kvio_registry *reg);
void kvio_registry_destroy(struct kvio_registry *reg);
/* 0, -EEXIST when it overlaps a region, -ENOSPC when all slots are taken. */
int kvio_registry_add(struct kvio_registry *reg, void *addr, size_t nbytes, bool huge);
int kvio_registry_remove(struct kvio_registry *reg, void *addr);

static inline bool kvio_registry_has_huge(const struct kvio_registry *reg)
{
  return atomic_load_explicit(&reg->huge_top, memory_order_relaxed) != 0;
}

/* Does [addr, addr + length) lie in one slice of huge pages? A hint, see above. */
bool kvio_registry_is_huge(const struct kvio_registry *reg, const void *addr, size_t length);

static inline bool kvio_view_stale(const struct kvio_view *view, const struct kvio_registry *reg)
{
  /* acquire: pairs with the release in kvio_registry_add/remove */
  return view->version != atomic_load_explicit(&reg->version, memory_order_acquire);
}

/* Brings the ring's table up to date. What the kernel refuses is left out and noted. */
void kvio_view_sync(struct kvio_view *view, struct kvio_registry *reg, struct kvio_ring *ring);

/* The slot whose slice holds all of [addr, addr + length), or -1. */
static inline int kvio_view_find(const struct kvio_view *view, const void *addr, size_t length)
{
  uintptr_t start = (uintptr_t)addr;
  for (uint32_t i = 0; i < view->n; i++)
    if (start >= view->sorted[i].start && start < view->sorted[i].end)
      return length <= view->sorted[i].end - start ? view->sorted[i].slot : -1;
  return -1;
}

#endif
