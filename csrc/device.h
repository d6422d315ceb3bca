/* SPDX-License-Identifier: Apache-2.0
 *
 * device: one member of a volume: a block device, a regular file, an NVMe generic character
 * device, or /dev/zero (for measuring the engine alone). Knows geometry, limits, exclusive open,
 * flush and discard of ONE member; knows nothing of stripes.
 *
 * Invariants
 *   D1  A member that is opened for writing has passed kvio_safety_inspect_fd() or allow_destroy
 *       was given, and a block device is held with O_EXCL as long as it is open, through a descriptor
 *       of its own (hold_fd): rings keep theirs for a while after they are gone, and the claim
 *       must end with the close. The NVMe character device holds its block device.
 *   D2  direct says what F_GETFL reports after the open, never what was asked for. (NVMe commands
 *       never pass the page cache: there it is true without a flag.)
 *   D3  mem_align, offset_align and write_align are powers of two. With O_DIRECT, offset_align is a
 *       multiple of the logical block and write_align >= offset_align, the physical block where
 *       that is larger. Without O_DIRECT the kernel takes anything and all three are 1.
 *   D4  size is a multiple of nothing in particular for files; for block devices it is what
 *       BLKGETSIZE64 says.
 */
#ifndef KVIO_DEVICE_H
#define KVIO_DEVICE_H

#include <sys/types.h>

#include "base.h"
#include "sysfs.h"

enum kvio_device_kind {
  KVIO_DEVICE_BLOCK,     /* /dev/nvme0n1, /dev/loop0, ... */
  KVIO_DEVICE_FILE,      /* a preallocated regular file */
  KVIO_DEVICE_ZERO,      /* /dev/zero: reads give zeros, writes vanish; size KVIO_ZERO_SIZE */
  KVIO_DEVICE_NVME_CHAR, /* /dev/ng0n1: commands by IORING_OP_URING_CMD */
};

#define KVIO_ZERO_SIZE (UINT64_C(1) << 40)
#define KVIO_ID_MAX 80

struct kvio_device_opts {
  const char *path;
  bool write;
  enum kvio_direct direct; /* kvio.h: KVIO_DIRECT_REQUIRE, _PREFER, _OFF */
  bool allow_destroy;
};

struct kvio_device {
  char *path;
  int fd;
  int hold_fd; /* the claim (O_EXCL) of a member opened for writing; files and readers: -1 */
  enum kvio_device_kind kind;
  dev_t dev;  /* of the file system that holds a file; 0 for devices */
  dev_t rdev; /* of the device node; 0 for files */
  ino_t ino;
  uint64_t size_bytes;
  uint32_t logical_block;
  uint32_t physical_block;
  uint32_t mem_align;    /* of a buffer address */
  uint32_t offset_align; /* of a read's offset and length */
  uint32_t write_align;  /* of a write's offset and length */
  /* Largest single I/O worth sending, a power of two between 64 KiB and 1 MiB (less where an NVMe
   * command cannot be that large). The block layer does not split an I/O that must not block: it
   * answers EAGAIN, and io_uring then hands it to an io-wq thread. So where nowait_read holds,
   * this is below the queue's own limit; elsewhere it is 1 MiB, since nothing is gained by less. */
  uint32_t max_io_bytes;
  /* The same when the buffer lies in 4 KiB pages that are not contiguous in memory: the limit of
   * max_segments then bites first. Equals max_io_bytes where huge pages change nothing. */
  uint32_t max_io_small_pages;
  bool write;          /* opened for writing */
  bool direct;         /* O_DIRECT is really set */
  bool nowait_read;    /* a RWF_NOWAIT read was accepted: not punted to io-wq by the kernel */
  bool volatile_cache; /* sysfs queue/write_cache says "write back" (files: true) */
  bool can_discard;
  bool sparse;                /* a file with holes: writes allocate blocks, and so serialise */
  uint32_t nsid;              /* NVMe character device: namespace id */
  uint32_t lba_shift;         /* NVMe character device: log2 of the LBA size */
  char identity[KVIO_ID_MAX]; /* NGUID, EUI-64 or UUID as sysfs prints it, "" when it has none */
  struct kvio_extent extent;  /* which bytes this member really is */
  char *destroys; /* what allow_destroy overrode, one reason a line; NULL when nothing */
};

/* Opens and inspects one member. Returns 0 or -errno with *err filled (path, reason, remedy). */
int kvio_device_open(struct kvio_device *dev, const struct kvio_device_opts *opts,
                     struct kvio_error *err);
void kvio_device_close(struct kvio_device *dev);

/* True when the two overlap: same file, same disk (a disk and its partition too), a file and the
 * loop device over it, or the same NVMe identity through another path. */
bool kvio_device_same(const struct kvio_device *a, const struct kvio_device *b);

/* Durable flush (fdatasync; a block device gets a FLUSH). Returns 0 or -errno. */
int kvio_device_flush(const struct kvio_device *dev);

/* Deallocates a range; -EOPNOTSUPP where the member cannot. Contents afterwards are undefined. A
 * file gets a hole, so later writes there allocate again. */
int kvio_device_discard(const struct kvio_device *dev, uint64_t offset, uint64_t length);

#endif
