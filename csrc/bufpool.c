/* SPDX-License-Identifier: Apache-2.0 */
#include "bufpool.h"

#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
#define SMALL_PAGE_BYTES ((size_t)4096)

static int map_hugetlb(struct kvio_memory *mem, size_t nbytes)
{
  size_t size = kvio_align_up(nbytes, HUGE_PAGE_BYTES);
  void *addr = mmap(
      NULL, size, PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_POPULATE | (21 << MAP_HUGE_SHIFT), -1, 0);
  if (addr == MAP_FAILED)
    return -errno;
  *mem = (struct kvio_memory){addr, size, KVIO_PAGES_HUGETLB};
  return 0;
}

/* Transparent huge pages need a 2 MiB aligned range: map more, give the ends back. */
static int map_plain(struct kvio_memory *mem, size_t nbytes, bool huge)
{
  size_t align = huge ? HUGE_PAGE_BYTES : SMALL_PAGE_BYTES;
  size_t size = kvio_align_up(nbytes, align);
  size_t slack = huge ? align : 0;
  char *raw = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED)
    return -errno;
  char *addr = (char *)kvio_align_up((uintptr_t)raw, align);
  if (addr > raw)
    munmap(raw, (size_t)(addr - raw));
  if (raw + size + slack > addr + size)
    munmap(addr + size, (size_t)((raw + size + slack) - (addr + size)));
  enum kvio_huge_granted granted = KVIO_PAGES_4K;
  if (huge && madvise(addr, size, MADV_HUGEPAGE) == 0)
    granted = KVIO_PAGES_THP;
  *mem = (struct kvio_memory){addr, size, granted};
  return 0;
}

int kvio_memory_map(struct kvio_memory *mem, size_t nbytes, enum kvio_hugepages want)
{
  if (nbytes == 0 || nbytes > SIZE_MAX / 2)
    return -EINVAL;
  int rc = -ENOMEM;
  if (want != KVIO_HUGE_OFF)
    rc = map_hugetlb(mem, nbytes);
  if (rc && want == KVIO_HUGE_REQUIRE)
    return rc;
  if (rc)
    rc = map_plain(mem, nbytes, want == KVIO_HUGE_AUTO && nbytes >= HUGE_PAGE_BYTES);
  if (rc)
    return rc;
  /* I/O may be under way while the process forks: copy-on-write would send the data astray. */
  if (madvise(mem->addr, mem->size_bytes, MADV_DONTFORK) != 0) {
    rc = -errno;
    munmap(mem->addr, mem->size_bytes);
  }
  return rc;
}

void kvio_memory_unmap(struct kvio_memory *mem)
{
  if (mem->addr)
    munmap(mem->addr, mem->size_bytes);
  mem->addr = NULL;
}

void kvio_registry_init(struct kvio_registry *reg)
{
  memset(reg, 0, sizeof(*reg));
  pthread_mutex_init(&reg->lock, NULL);
}

void kvio_registry_destroy(struct kvio_registry *reg)
{
  pthread_mutex_destroy(&reg->lock);
}

bool kvio_registry_is_huge(const struct kvio_registry *reg, const void *addr, size_t length)
{
  uintptr_t start = (uintptr_t)addr;
  uint32_t top = atomic_load_explicit(&reg->huge_top, memory_order_relaxed);
  for (uint32_t i = 0; i < top; i++)
    if (start >= atomic_load_explicit(&reg->huge[i].start, memory_order_relaxed) &&
        start + length <= atomic_load_explicit(&reg->huge[i].end, memory_order_relaxed))
      return true;
  return false;
}

/* The lock held: slice i is in huge pages, or gone. */
static void note_huge(struct kvio_registry *reg, uint32_t i, bool huge)
{
  uintptr_t start = huge ? reg->slices[i].start : 0;
  uintptr_t end = huge ? start + reg->slices[i].size_bytes : 0;
  atomic_store_explicit(&reg->huge[i].start, start, memory_order_relaxed);
  atomic_store_explicit(&reg->huge[i].end, end, memory_order_relaxed);
  uint32_t top = KVIO_MAX_SLICES;
  while (top > 0 && atomic_load_explicit(&reg->huge[top - 1].end, memory_order_relaxed) == 0)
    top--;
  atomic_store_explicit(&reg->huge_top, top, memory_order_relaxed);
}

static int registry_add_locked(struct kvio_registry *reg, uintptr_t start, size_t nbytes, bool huge)
{
  uint32_t need = (uint32_t)((nbytes + KVIO_SLICE_BYTES - 1) / KVIO_SLICE_BYTES);
  uint32_t free_slots = 0;
  for (uint32_t i = 0; i < KVIO_MAX_SLICES; i++) {
    const struct kvio_slice *slice = &reg->slices[i];
    if (slice->start == 0)
      free_slots++;
    else if (start < slice->start + slice->size_bytes && slice->start < start + nbytes)
      return -EEXIST;
  }
  if (free_slots < need)
    return -ENOSPC;
  uint64_t version = atomic_load_explicit(&reg->version, memory_order_relaxed) + 1;
  size_t done = 0;
  for (uint32_t i = 0; done < nbytes; i++) {
    struct kvio_slice *slice = &reg->slices[i];
    if (slice->start != 0)
      continue;
    *slice = (struct kvio_slice){start + done, kvio_min_u64(nbytes - done, KVIO_SLICE_BYTES), start,
                                 version};
    done += slice->size_bytes;
    note_huge(reg, i, huge);
  }
  reg->n_regions++;
  /* release: pairs with the acquire in kvio_view_stale */
  atomic_store_explicit(&reg->version, version, memory_order_release);
  return 0;
}

int kvio_registry_add(struct kvio_registry *reg, void *addr, size_t nbytes, bool huge)
{
  if (!addr || nbytes == 0 || (uintptr_t)addr > UINTPTR_MAX - nbytes ||
      nbytes > KVIO_MAX_SLICES * KVIO_SLICE_BYTES)
    return -EINVAL;
  pthread_mutex_lock(&reg->lock);
  int rc = registry_add_locked(reg, (uintptr_t)addr, nbytes, huge);
  pthread_mutex_unlock(&reg->lock);
  return rc;
}

int kvio_registry_remove(struct kvio_registry *reg, void *addr)
{
  int rc = -ENOENT;
  pthread_mutex_lock(&reg->lock);
  for (uint32_t i = 0; i < KVIO_MAX_SLICES; i++) {
    struct kvio_slice *slice = &reg->slices[i];
    if (slice->start == 0 || slice->region != (uintptr_t)addr)
      continue;
    memset(slice, 0, sizeof(*slice));
    note_huge(reg, i, false);
    rc = 0;
  }
  if (rc == 0) {
    reg->n_regions--;
    /* release: pairs with the acquire in kvio_view_stale */
    atomic_fetch_add_explicit(&reg->version, 1, memory_order_release);
  }
  pthread_mutex_unlock(&reg->lock);
  return rc;
}

static void rebuild_sorted(struct kvio_view *view, const struct kvio_registry *reg)
{
  view->n = 0;
  for (uint32_t i = 0; i < KVIO_MAX_SLICES; i++) {
    const struct kvio_slice *slice = &reg->slices[i];
    if (view->slot_version[i] == 0)
      continue;
    uint32_t at = view->n++;
    while (at > 0 && view->sorted[at - 1].start > slice->start) {
      view->sorted[at] = view->sorted[at - 1];
      at--;
    }
    view->sorted[at].start = slice->start;
    view->sorted[at].end = slice->start + slice->size_bytes;
    view->sorted[at].slot = (int)i;
  }
}

void kvio_view_sync(struct kvio_view *view, struct kvio_registry *reg, struct kvio_ring *ring)
{
  pthread_mutex_lock(&reg->lock);
  for (uint32_t i = 0; i < KVIO_MAX_SLICES; i++) {
    const struct kvio_slice *slice = &reg->slices[i];
    if (view->slot_version[i] == slice->version)
      continue;
    struct iovec iov = {NULL, 0};
    if (view->slot_version[i] != 0)
      kvio_ring_set_buffer(ring, i, &iov);
    view->slot_version[i] = 0;
    if (slice->start == 0)
      continue;
    iov = (struct iovec){(void *)slice->start, slice->size_bytes};
    int rc = kvio_ring_set_buffer(ring, i, &iov);
    if (rc == 0)
      view->slot_version[i] = slice->version;
    else
      atomic_store_explicit(&reg->last_errno, -rc, memory_order_relaxed);
  }
  view->version = atomic_load_explicit(&reg->version, memory_order_relaxed);
  rebuild_sorted(view, reg);
  pthread_mutex_unlock(&reg->lock);
}
