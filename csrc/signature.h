/* SPDX-License-Identifier: Apache-2.0
 *
 * signature: does a head and a tail of a device look like a file system, a RAID or LVM member, an
 * encrypted volume or a partition table? Plain functions on plain memory; no I/O.
 */
#ifndef KVIO_SIGNATURE_H
#define KVIO_SIGNATURE_H

#include "base.h"

#define KVIO_SIGNATURE_WINDOW (UINT64_C(1) << 20) /* bytes looked at, at each end */

struct kvio_signature_view {
  const uint8_t *head; /* the first head_bytes of the device */
  uint64_t head_bytes;
  const uint8_t *tail; /* the last tail_bytes of the device; may overlap the head */
  uint64_t tail_bytes;
  uint64_t size_bytes; /* of the device */
};

struct kvio_signature_hit {
  const char *name;
  uint64_t offset; /* of the magic, in bytes from the start of the device */
  bool table;      /* a partition table; else a file system, RAID, LVM, ... */
};

/* Fills up to max hits, one for each name. Returns how many. */
uint32_t kvio_signature_scan(const struct kvio_signature_view *view,
                             struct kvio_signature_hit *hits, uint32_t max);

#endif
