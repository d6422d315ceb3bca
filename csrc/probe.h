/* SPDX-License-Identifier: Apache-2.0
 *
 * probe: what one open descriptor can do, found out by asking it: alignment, whether a read that
 * must not block is accepted, how large an I/O is worth sending. Versions are never compared.
 */
#ifndef KVIO_PROBE_H
#define KVIO_PROBE_H

#include "base.h"
#include "sysfs.h"

#define KVIO_IO_MIN_BYTES (UINT64_C(64) << 10)
#define KVIO_IO_MAX_BYTES (UINT64_C(1) << 20)

struct kvio_alignment {
  uint32_t memory; /* of buffer addresses */
  uint32_t read;   /* of offsets and lengths */
  uint32_t write;
};

struct kvio_io_limits {
  uint32_t huge_pages;  /* largest I/O from memory that is contiguous */
  uint32_t small_pages; /* largest I/O from scattered 4 KiB pages */
};

/* Alignment that an O_DIRECT descriptor asks for; logical_block is 0 for files. Each candidate is
 * confirmed by a read. Returns 0, or -EINVAL when no aligned O_DIRECT read is accepted at all. */
int kvio_probe_alignment(struct kvio_alignment *align, int fd, uint32_t logical_block);

/* True when a read of read_bytes at 0 with RWF_NOWAIT is served, or would be (EAGAIN). */
bool kvio_probe_nowait(int fd, uint32_t read_bytes);

/* The limits of the queue under a device; block NULL: not known, nothing is assumed. */
void kvio_probe_limits(struct kvio_io_limits *limits, const struct kvio_sysfs_block *block,
                       bool nowait);

#endif
