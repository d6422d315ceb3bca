/* SPDX-License-Identifier: Apache-2.0
 *
 * probe: see probe.h. The only I/O here is reads at offset 0.
 */
#include "probe.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE_BYTES UINT64_C(4096)
#define ALIGN_MIN 512
#define ALIGN_MAX 65536 /* Linux has no larger logical block */

/* struct statx as far as needed, with fields that older C libraries do not have. */
struct statx_answer {
  uint32_t mask, blksize;
  uint64_t attributes;
  uint32_t nlink, uid, gid;
  uint16_t mode, spare0;
  uint64_t ino, size, blocks, attributes_mask;
  uint64_t times[8];
  uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
  uint64_t mnt_id;
  uint32_t dio_mem_align, dio_offset_align;
  uint64_t subvol;
  uint32_t atomic_write_unit_min, atomic_write_unit_max, atomic_write_segments_max;
  uint32_t dio_read_offset_align;
  uint64_t spare[9];
};
_Static_assert(sizeof(struct statx_answer) == 256, "the kernel writes 256 bytes");
_Static_assert(offsetof(struct statx_answer, dio_mem_align) == 0x98, "layout of struct statx");
_Static_assert(offsetof(struct statx_answer, dio_read_offset_align) == 0xb4,
               "layout of struct statx");

#define ASK_DIOALIGN 0x00002000u
#define ASK_DIO_READ_ALIGN 0x00020000u

/* What the kernel says; zeros where it says nothing. True when it says "no direct I/O here". */
static bool ask_statx(struct kvio_alignment *align, int fd)
{
  struct statx_answer st = {0};
  *align = (struct kvio_alignment){0};
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, ASK_DIOALIGN | ASK_DIO_READ_ALIGN, &st) != 0 ||
      !(st.mask & ASK_DIOALIGN))
    return false;
  align->memory = st.dio_mem_align;
  align->read = align->write = st.dio_offset_align;
  if ((st.mask & ASK_DIO_READ_ALIGN) && st.dio_read_offset_align)
    align->read = st.dio_read_offset_align;
  return st.dio_offset_align == 0;
}

static uint32_t sane(uint32_t align, uint32_t otherwise)
{
  return kvio_is_pow2(align) && align <= ALIGN_MAX ? align : otherwise;
}

/* EINVAL is what a misaligned read gets; any other failure is not about alignment. */
static bool read_accepted(int fd, void *scratch, uint32_t bytes)
{
  ssize_t n;
  do
    n = pread(fd, scratch, bytes, 0);
  while (n < 0 && errno == EINTR);
  return n >= 0 || errno != EINVAL;
}

int kvio_probe_alignment(struct kvio_alignment *align, int fd, uint32_t logical_block)
{
  void *scratch = NULL;
  if (ask_statx(align, fd) && logical_block == 0)
    return -EINVAL; /* a file of a file system that would serve O_DIRECT from its cache */
  uint32_t read = kvio_max_u64(sane(align->read, 0), logical_block);
  int rc = posix_memalign(&scratch, ALIGN_MAX, ALIGN_MAX);
  if (rc)
    return -rc;
  for (read = read ? read : ALIGN_MIN; read <= ALIGN_MAX; read *= 2)
    if (read_accepted(fd, scratch, read))
      break;
  free(scratch);
  if (read > ALIGN_MAX)
    return -EINVAL;
  align->read = read;
  align->write = kvio_max_u64(sane(align->write, 0), read);
  align->memory = sane(align->memory, read);
  return 0;
}

bool kvio_probe_nowait(int fd, uint32_t read_bytes)
{
  void *scratch = NULL;
  uint32_t bytes = kvio_max_u64(read_bytes, ALIGN_MIN);
  if (posix_memalign(&scratch, ALIGN_MAX, bytes))
    return false;
  struct iovec iov = {.iov_base = scratch, .iov_len = bytes};
  ssize_t n;
  do
    n = preadv2(fd, &iov, 1, 0, RWF_NOWAIT);
  while (n < 0 && errno == EINTR);
  bool accepted = n >= 0 || errno == EAGAIN;
  free(scratch);
  return accepted;
}

static uint32_t clamp_io(uint64_t bytes)
{
  bytes = kvio_min_u64(kvio_max_u64(bytes, KVIO_IO_MIN_BYTES), KVIO_IO_MAX_BYTES);
  while (!kvio_is_pow2(bytes))
    bytes &= bytes - 1;
  return (uint32_t)bytes;
}

void kvio_probe_limits(struct kvio_io_limits *limits, const struct kvio_sysfs_block *block,
                       bool nowait)
{
  uint64_t max_kb = 0, max_segments = 0;
  limits->huge_pages = limits->small_pages = KVIO_IO_MAX_BYTES;
  if (!nowait || !block)
    return;
  /* Values that say nothing (virtio: 2147483647) end in the clamp. A power of two keeps a stripe
   * unit a whole number of I/Os. */
  if (kvio_sysfs_u64(&max_kb, "%s/queue/max_sectors_kb", block->disk_dir) == 0 && max_kb)
    limits->huge_pages = clamp_io(kvio_min_u64(max_kb, KVIO_IO_MAX_BYTES) << 10);
  limits->small_pages = limits->huge_pages;
  if (kvio_sysfs_u64(&max_segments, "%s/queue/max_segments", block->disk_dir) == 0 && max_segments)
    limits->small_pages = clamp_io(kvio_min_u64(
        limits->huge_pages, kvio_min_u64(max_segments, KVIO_IO_MAX_BYTES) * PAGE_BYTES));
}
