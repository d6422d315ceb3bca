/* SPDX-License-Identifier: Apache-2.0 */
#include "layout.h"

#include <stdlib.h>
#include <string.h>

static int add_zone(struct kvio_layout *layout, const uint64_t *usable, uint32_t n_members,
                    uint64_t from)
{
  struct kvio_zone *zone = &layout->zones[layout->n_zones];
  uint64_t to = UINT64_MAX;
  zone->n = 0;
  for (uint32_t i = 0; i < n_members; i++) {
    if (usable[i] <= from)
      continue;
    zone->members[zone->n++] = (uint16_t)i;
    to = kvio_min_u64(to, usable[i]);
  }
  uint64_t bytes;
  if (__builtin_mul_overflow(to - from, (uint64_t)zone->n, &bytes) ||
      __builtin_add_overflow(layout->size_bytes, bytes, &zone->end) ||
      zone->end > INT64_MAX) /* offsets travel as signed 64-bit numbers */
    return -EFBIG;
  zone->start = layout->size_bytes;
  zone->member_start = from;
  layout->size_bytes = zone->end;
  layout->n_zones++;
  return 0;
}

int kvio_layout_init(struct kvio_layout *layout, const uint64_t *sizes, uint32_t n_members,
                     uint64_t stripe_unit)
{
  memset(layout, 0, sizeof(*layout));
  if (!kvio_is_pow2(stripe_unit) || n_members == 0 || n_members > KVIO_MAX_MEMBERS)
    return -EINVAL;
  layout->stripe_unit = stripe_unit;
  layout->unit_shift = (uint32_t)__builtin_ctzll(stripe_unit);
  layout->zones = calloc(n_members, sizeof(*layout->zones));
  if (!layout->zones)
    return -ENOMEM;
  uint64_t usable[KVIO_MAX_MEMBERS];
  uint64_t largest = 0;
  for (uint32_t i = 0; i < n_members; i++) {
    usable[i] = n_members == 1 ? sizes[i] : kvio_align_down(sizes[i], stripe_unit);
    largest = kvio_max_u64(largest, usable[i]);
    if (usable[i] == 0) {
      kvio_layout_free(layout);
      return -ENOSPC;
    }
  }
  uint64_t from = 0;
  while (from < largest) {
    int rc = add_zone(layout, usable, n_members, from);
    if (rc) {
      kvio_layout_free(layout);
      return rc;
    }
    const struct kvio_zone *zone = &layout->zones[layout->n_zones - 1];
    from = zone->member_start + (zone->end - zone->start) / zone->n;
  }
  return 0;
}

void kvio_layout_free(struct kvio_layout *layout)
{
  free(layout->zones);
  layout->zones = NULL;
  layout->n_zones = 0;
}

const struct kvio_zone *kvio_layout_zone(const struct kvio_layout *layout, uint64_t offset)
{
  KVIO_ASSERT(offset < layout->size_bytes);
  const struct kvio_zone *zone = layout->zones;
  while (offset >= zone->end)
    zone++;
  return zone;
}

struct kvio_piece kvio_layout_map(const struct kvio_layout *layout, uint64_t offset,
                                  uint64_t max_length)
{
  const struct kvio_zone *zone = kvio_layout_zone(layout, offset);
  uint64_t in_zone = offset - zone->start;
  struct kvio_piece piece;
  if (zone->n == 1) {
    piece.member = zone->members[0];
    piece.offset = zone->member_start + in_zone;
    piece.length = kvio_min_u64(max_length, zone->end - offset);
    return piece;
  }
  uint64_t unit = in_zone >> layout->unit_shift;
  uint64_t in_unit = in_zone & (layout->stripe_unit - 1);
  uint64_t row = unit / zone->n;
  piece.member = zone->members[unit - row * zone->n];
  piece.offset = zone->member_start + (row << layout->unit_shift) + in_unit;
  piece.length = kvio_min_u64(max_length, layout->stripe_unit - in_unit);
  return piece;
}

uint64_t kvio_layout_unmap(const struct kvio_layout *layout, uint32_t member, uint64_t offset)
{
  for (uint32_t z = 0; z < layout->n_zones; z++) {
    const struct kvio_zone *zone = &layout->zones[z];
    uint64_t per_member = (zone->end - zone->start) / zone->n;
    if (offset < zone->member_start || offset - zone->member_start >= per_member)
      continue;
    for (uint32_t i = 0; i < zone->n; i++) {
      if (zone->members[i] != member)
        continue;
      uint64_t in_member = offset - zone->member_start;
      if (zone->n == 1)
        return zone->start + in_member;
      uint64_t row = in_member >> layout->unit_shift;
      return zone->start + (((row * zone->n) + i) << layout->unit_shift) +
             (in_member & (layout->stripe_unit - 1));
    }
  }
  return UINT64_MAX;
}
