/* SPDX-License-Identifier: Apache-2.0
 *
 * safety: would a write to this path destroy something? Reads sysfs, the mount table and the
 * first and last MiB; never writes.
 *
 * Invariants
 *   S1  What cannot be looked at is a reason (KVIO_UNSAFE_UNREADABLE), never a silent yes.
 *   S2  Every reason bit has a line in the text that names what was found and where.
 */
#ifndef KVIO_SAFETY_H
#define KVIO_SAFETY_H

#include "base.h"

/* Bits of kvio_verdict.reasons. 0 = kvio would write there. */
#define KVIO_UNSAFE_MOUNTED (1u << 0) /* mounted, or swap */
#define KVIO_UNSAFE_PARTITION_MOUNTED (1u << 1)
#define KVIO_UNSAFE_HELD (1u << 2)        /* LVM, md, dm, bcache, or another opener with O_EXCL */
#define KVIO_UNSAFE_PARTITIONED (1u << 3) /* partition table, or partitions in sysfs */
#define KVIO_UNSAFE_SIGNATURE (1u << 4)   /* file system, RAID or LVM signature */
#define KVIO_UNSAFE_HIDDEN_PATH (1u << 5) /* a leg of a multipath head */
#define KVIO_UNSAFE_READ_ONLY (1u << 6)
#define KVIO_UNSAFE_UNREADABLE (1u << 7)   /* could not be inspected: not certain, so no */
#define KVIO_UNSAFE_BACKING_FILE (1u << 8) /* a file in use as swap or behind a loop device */

/* Reasons that allow_destroy cannot override. */
#define KVIO_UNSAFE_NEVER                                                                          \
  (KVIO_UNSAFE_MOUNTED | KVIO_UNSAFE_PARTITION_MOUNTED | KVIO_UNSAFE_HELD |                        \
   KVIO_UNSAFE_HIDDEN_PATH | KVIO_UNSAFE_READ_ONLY)

struct kvio_verdict {
  uint32_t reasons;
  char text[2048]; /* one reason a line, each naming what is there ("ext4 signature at 1080") */
};

/* root: prefix for /sys and /proc ("" on a live system, a directory in tests).
 * Returns 0 with *verdict filled, or -errno when the path itself cannot be looked at. */
int kvio_safety_inspect(const char *path, const char *root, struct kvio_verdict *verdict);

/* The same through a descriptor that the caller has opened, for a block device with O_EXCL: the
 * check and the claim are then one, so nothing can be mounted between them. */
int kvio_safety_inspect_fd(int fd, const char *path, const char *root,
                           struct kvio_verdict *verdict);

#endif
