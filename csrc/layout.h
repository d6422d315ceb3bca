/* SPDX-License-Identifier: Apache-2.0
 *
 * layout: pure stripe arithmetic, address in the volume -> (member, offset on it, length). No I/O.
 *
 * Members may differ in size. The volume is cut into zones: the first zone stripes over all
 * members up to the size of the smallest, the next over those that have room left, and so on.
 * Within a zone, stripe unit k lies on the zone's member k mod n.
 *
 * Invariants
 *   L1  Every byte of [0, size) maps to exactly one byte of one member, and no two to the same.
 *   L2  A piece never crosses a stripe unit (except in a zone of one member) nor a zone.
 *   L3  stripe_unit is a power of two; zone borders are multiples of it on the members.
 */
#ifndef KVIO_LAYOUT_H
#define KVIO_LAYOUT_H

#include "base.h"

struct kvio_zone {
  uint64_t start;        /* first byte in the volume */
  uint64_t end;          /* one past the last */
  uint64_t member_start; /* where the zone begins on each of its members */
  uint32_t n;            /* members in this zone */
  uint16_t members[KVIO_MAX_MEMBERS];
};

struct kvio_layout {
  uint64_t size_bytes;
  uint64_t stripe_unit;
  uint32_t unit_shift;
  uint32_t n_zones;
  struct kvio_zone *zones;
};

struct kvio_piece {
  uint32_t member;
  uint64_t offset; /* bytes on the member */
  uint64_t length; /* bytes */
};

/* sizes[i]: usable bytes of member i. A single member is used whole; several are used in whole
 * stripe units. Returns 0, -EINVAL for a bad stripe unit, -ENOSPC when no unit fits, -ENOMEM. */
int kvio_layout_init(struct kvio_layout *layout, const uint64_t *sizes, uint32_t n_members,
                     uint64_t stripe_unit);
void kvio_layout_free(struct kvio_layout *layout);

const struct kvio_zone *kvio_layout_zone(const struct kvio_layout *layout, uint64_t offset);

/* The longest piece that begins at offset; offset < size_bytes, max_length > 0. */
struct kvio_piece kvio_layout_map(const struct kvio_layout *layout, uint64_t offset,
                                  uint64_t max_length);

/* The inverse: the address in the volume of a byte of a member, or UINT64_MAX if unused. */
uint64_t kvio_layout_unmap(const struct kvio_layout *layout, uint32_t member, uint64_t offset);

#endif
