/* SPDX-License-Identifier: Apache-2.0
 *
 * sysfs: how Linux describes a block device: its name, its disk, its limits, what is behind a loop
 * device. Reads text files and nothing else; every path has a prefix, so that tests can bring a
 * tree of their own.
 */
#ifndef KVIO_SYSFS_H
#define KVIO_SYSFS_H

#include <limits.h>
#include <sys/types.h>

#include "base.h"

#define KVIO_SYSFS_NAME_MAX 64
#define KVIO_SECTOR_BYTES 512 /* sysfs counts sizes and starts in these, whatever the block size */

struct kvio_sysfs_block {
  dev_t rdev;
  dev_t disk; /* the whole disk; rdev when this is one */
  bool partition;
  uint64_t start_bytes; /* of a partition on its disk, else 0 */
  uint64_t size_bytes;
  char name[KVIO_SYSFS_NAME_MAX]; /* "nvme0n1p1" */
  char disk_name[KVIO_SYSFS_NAME_MAX];
  char dir[PATH_MAX];      /* of the device, symbolic links resolved */
  char disk_dir[PATH_MAX]; /* of the whole disk: queue/ is there */
};

/* Which bytes a device or a file really is, after looking through partitions and loop devices. */
struct kvio_extent {
  dev_t dev; /* the whole disk, or the file system that holds a file */
  ino_t ino; /* 0 for a disk */
  uint64_t start_bytes;
  uint64_t length_bytes;
};

#define KVIO_SYSFS_STACK_MAX 8 /* loop devices over loop devices, ... */

/* The disks that were looked through to find an extent: the device's own first. */
struct kvio_sysfs_stack {
  dev_t disks[KVIO_SYSFS_STACK_MAX];
  uint32_t n;
};

/* What is behind a bound loop device. */
struct kvio_sysfs_loop {
  char file[PATH_MAX];
  bool resolved; /* dev, ino and rdev are known */
  dev_t dev;
  ino_t ino;
  dev_t rdev; /* when the file is itself a block device, else 0 */
  uint64_t offset_bytes;
  uint64_t limit_bytes; /* 0 = to the end of the file */
};

/* Reads one attribute, without its newline. Returns 0 or -errno; out is "" on failure. */
int kvio_sysfs_text(char *out, size_t out_bytes, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Reads one unsigned decimal attribute. Returns 0 or -errno. */
int kvio_sysfs_u64(uint64_t *out, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Reads the number of a device from the file "dev" of its directory. Returns 0 or -errno. */
int kvio_sysfs_dev(dev_t *rdev, const char *dir);

bool kvio_sysfs_exists(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Finds a block device by its number. Returns 0, -ENOENT, or -errno. */
int kvio_sysfs_block_find(struct kvio_sysfs_block *block, const char *root, dev_t rdev);

/* Finds the block device that belongs to /dev/ngXnY by its name (ng0n1 -> nvme0n1). */
int kvio_sysfs_generic_sibling(dev_t *rdev, char name[KVIO_SYSFS_NAME_MAX], const char *root,
                               dev_t generic);

/* Looks behind a loop device. Returns 0, -ENOENT when it is none or is not bound, or -errno. */
int kvio_sysfs_loop_find(struct kvio_sysfs_loop *loop, const char *root, const char *disk_name);

/* Which bytes a block device is. Fills *stack too unless it is NULL. Returns 0 or -errno; a loop
 * device whose file cannot be identified counts as a disk of its own. */
int kvio_sysfs_extent(struct kvio_extent *extent, struct kvio_sysfs_stack *stack, const char *root,
                      dev_t rdev);

bool kvio_extent_overlap(const struct kvio_extent *a, const struct kvio_extent *b);

/* NGUID, EUI-64 or UUID of an NVMe namespace, "" when there is none. */
void kvio_sysfs_identity(char *out, size_t out_bytes, const struct kvio_sysfs_block *block);

#endif
