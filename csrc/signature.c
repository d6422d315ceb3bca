/* SPDX-License-Identifier: Apache-2.0
 *
 * signature: one table, one loop. A row says where a structure begins, where in it the magic is,
 * and what the magic is. The offsets are facts of the on-disk formats as their authors publish
 * them (kernel headers, format documents, blkid(8) as an oracle in the tests).
 *
 * Invariants
 *   G1  The chance that random bytes match any row is below 2^-24 a device: a magic shorter than
 *       four bytes has a check that asks for more. KV pages are random bytes, and a volume that
 *       looked like a file system by accident could not be opened again.
 *   G2  A check may only turn a hit into a miss when the format rules it out: a damaged file system
 *       is still somebody's file system.
 *   G3  Nothing outside the two windows is touched; peek() gives NULL there.
 */
#include "signature.h"

#include <string.h>

/* A structure that begins at base (bytes from the start; or, for END(), size rounded down to a
 * multiple of the block, minus a distance). */
struct row {
  const char *name;
  int64_t base;       /* >= 0 from the start; < 0 from the rounded end */
  uint32_t end_block; /* what the size is rounded down to when base < 0 */
  uint32_t at;        /* of the magic, from base */
  const char *magic;
  uint32_t magic_bytes;
  bool (*check)(const struct kvio_signature_view *view, uint64_t base);
  bool table;
};

#define KIB(n) ((n)*1024)
#define MAGIC(s) .magic = (s), .magic_bytes = sizeof(s) - 1
#define START(b, o) .base = (b), .at = (o)
#define END(block, distance, o) .base = -(int64_t)(distance), .end_block = (block), .at = (o)

static const uint8_t *peek(const struct kvio_signature_view *view, uint64_t offset, uint64_t bytes)
{
  if (offset + bytes <= view->head_bytes)
    return view->head + offset;
  uint64_t tail_start = view->size_bytes - view->tail_bytes;
  if (offset >= tail_start && offset + bytes <= view->size_bytes)
    return view->tail + (offset - tail_start);
  return NULL;
}

static uint16_t le16(const uint8_t *p)
{
  return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t le32(const uint8_t *p)
{
  return (uint32_t)le16(p) | (uint32_t)le16(p + 2) << 16;
}

static uint32_t be32(const uint8_t *p)
{
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* ---- checks: what a short magic must be accompanied by ------------------------------------ */

static bool check_ext(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sb = peek(view, base, 128);
  /* block size 1 KiB << n, revision 0 or 1, and there are blocks */
  return sb && le32(sb + 24) <= 10 && le32(sb + 76) <= 1 && le32(sb + 4) != 0;
}

static bool check_fat(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *bs = peek(view, base, 512);
  if (!bs || (bs[0] != 0xeb && bs[0] != 0xe9))
    return false;
  uint32_t sector_bytes = le16(bs + 11);
  return kvio_is_pow2(sector_bytes) && sector_bytes >= 128 && sector_bytes <= 32768 &&
         kvio_is_pow2(bs[13]) && le16(bs + 14) != 0 && bs[16] >= 1 && bs[16] <= 2 &&
         (bs[21] == 0xf0 || bs[21] >= 0xf8);
}

/* 0x55AA alone is no partition table: it also ends every boot sector, and 1 in 65536 random ones.
 * A table has four entries whose boot flags are 0x00 or 0x80. An empty table (a fresh disk label)
 * passes; so does a protective one. The boot sector of a file system is reported as that. */
static bool check_mbr(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sector = peek(view, base, 512);
  if (!sector || check_fat(view, base) || memcmp(sector + 3, "NTFS    ", 8) == 0 ||
      memcmp(sector + 3, "EXFAT   ", 8) == 0)
    return false;
  for (const uint8_t *entry = sector + 446; entry < sector + 510; entry += 16) {
    if (entry[0] != 0x00 && entry[0] != 0x80)
      return false;
    if (entry[4] != 0 && le32(entry + 12) == 0)
      return false; /* a type without a length */
  }
  return true;
}

/* Sun labels end in a 16-bit xor over the sector. */
static bool check_sun(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sector = peek(view, base, 512);
  uint8_t even = 0, odd = 0;
  for (uint32_t i = 0; sector && i < 512; i += 2) {
    even ^= sector[i];
    odd ^= sector[i + 1];
  }
  return sector && even == 0 && odd == 0;
}

static bool check_bsd(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *label = peek(view, base, 148);
  return label && le32(label + 132) == 0x82564557; /* the magic stands twice */
}

static bool check_mac(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *entry = peek(view, base + 512, 512);
  return entry && ((entry[0] == 'P' && entry[1] == 'M') || (entry[0] == 'T' && entry[1] == 'S'));
}

static bool check_amiga(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *block = peek(view, base, 8);
  return block && be32(block + 4) <= 128; /* length of the block in 32-bit words */
}

static bool check_hfs(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *mdb = peek(view, base, 64);
  uint32_t block_bytes = mdb ? be32(mdb + 20) : 0;
  return block_bytes != 0 && block_bytes % 512 == 0 && be32(mdb + 2) != 0;
}

static bool check_hfsplus(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sb = peek(view, base, 64);
  return sb && sb[2] == 0 && (sb[3] == 4 || sb[3] == 5) && kvio_is_pow2(be32(sb + 40));
}

static bool check_minix(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sb = peek(view, base, 32);
  uint32_t first_data = sb ? le16(sb + 8) : 0;
  return sb && le16(sb) != 0 && le16(sb + 4) != 0 && le16(sb + 6) != 0 && first_data >= 4 &&
         le16(sb + 10) <= 3 && le16(sb + 18) <= 3;
}

static bool check_minix3(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sb = peek(view, base, 32);
  return sb && le32(sb) != 0 && le16(sb + 4) == 0 && le16(sb + 6) != 0 &&
         kvio_is_pow2(le16(sb + 28)) && le16(sb + 28) >= 512;
}

static bool check_nilfs(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sb = peek(view, base, 64);
  return sb && le32(sb) == 2 && le32(sb + 20) <= 6; /* revision; block size 1 KiB << n */
}

static bool check_squashfs(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sb = peek(view, base, 32);
  return sb && sb[29] == 0 && sb[28] >= 1 && sb[28] <= 4; /* major version */
}

static bool check_squashfs_be(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *sb = peek(view, base, 32);
  return sb && sb[28] == 0 && sb[29] >= 1 && sb[29] <= 4;
}

static bool check_qcow(const struct kvio_signature_view *view, uint64_t base)
{
  const uint8_t *header = peek(view, base, 8);
  return header && be32(header + 4) >= 1 && be32(header + 4) <= 3;
}

/* ---- the table ---------------------------------------------------------------------------- */

#define SWAP_ROWS(page)                                                                            \
  {"swap", START(0, (page)-10), MAGIC("SWAPSPACE2")},                                              \
      {"swap", START(0, (page)-10), MAGIC("SWAP-SPACE")},                                          \
      {"hibernation image", START(0, (page)-10), MAGIC("S1SUSPEND\0")},                            \
      {"hibernation image", START(0, (page)-10), MAGIC("S2SUSPEND\0")},                            \
      {"hibernation image", START(0, (page)-10), MAGIC("ULSUSPEND\0")},                            \
  {                                                                                                \
    "hibernation image", START(0, (page)-10), MAGIC("LINHIB0001")                                  \
  }
#define GPT_ROWS(block)                                                                            \
  {"GPT", START(block, 0), MAGIC("EFI PART"), .table = true},                                      \
  {                                                                                                \
    "GPT backup", END(512, block, 0), MAGIC("EFI PART"), .table = true                             \
  }
#define LVM_ROW(sector)                                                                            \
  {                                                                                                \
    "LVM2", START((sector)*512, 0), MAGIC("LABELONE")                                              \
  }
#define AMIGA_ROW(sector)                                                                          \
  {                                                                                                \
    "Amiga partitions", START((sector)*512, 0), MAGIC("RDSK"), .check = check_amiga, .table = true \
  }
#define AMIGA_ROWS(first)                                                                          \
  AMIGA_ROW(first), AMIGA_ROW((first) + 1), AMIGA_ROW((first) + 2), AMIGA_ROW((first) + 3)
#define LUKS2_ROW(offset)                                                                          \
  {                                                                                                \
    "LUKS2 second header", START(offset, 0), MAGIC("SKUL\xba\xbe")                                 \
  }

static const struct row rows[] = {
    /* partition tables */
    GPT_ROWS(512),
    GPT_ROWS(1024),
    GPT_ROWS(2048),
    GPT_ROWS(4096),
    {"MBR", START(0, 510), MAGIC("\x55\xaa"), .check = check_mbr, .table = true},
    {"Apple partition map", START(0, 0), MAGIC("ER"), .check = check_mac, .table = true},
    {"BSD disklabel", START(0, 0), MAGIC("\x57\x45\x56\x82"), .check = check_bsd, .table = true},
    {"BSD disklabel", START(64, 0), MAGIC("\x57\x45\x56\x82"), .check = check_bsd, .table = true},
    {"BSD disklabel", START(128, 0), MAGIC("\x57\x45\x56\x82"), .check = check_bsd, .table = true},
    {"BSD disklabel", START(512, 0), MAGIC("\x57\x45\x56\x82"), .check = check_bsd, .table = true},
    {"SGI disklabel", START(0, 0), MAGIC("\x0b\xe5\xa9\x41"), .table = true},
    {"Sun disklabel", START(0, 508), MAGIC("\xda\xbe"), .check = check_sun, .table = true},
    AMIGA_ROWS(0),
    AMIGA_ROWS(4),
    AMIGA_ROWS(8),
    AMIGA_ROWS(12),
    {"UnixWare partitions", START(29 * 512, 4), MAGIC("\x0d\x60\xe5\xca"), .table = true},
    {"GNU Parted loop label", START(0, 0), MAGIC("GNU Parted Loopback 0"), .table = true},

    /* file systems */
    {"ext2/3/4", START(1024, 56), MAGIC("\x53\xef"), .check = check_ext},
    {"XFS", START(0, 0), MAGIC("XFSB")},
    {"XFS log", START(0, 0), MAGIC("\xfe\xed\xba\xbe\0\0\0")},
    {"XFS log", START(512, 0), MAGIC("\xfe\xed\xba\xbe\0\0\0")},
    {"btrfs", START(KIB(64), 64), MAGIC("_BHRfS_M")},
    {"bcachefs or bcache", START(4096, 24), MAGIC("\xc6\x85\x73\xf6")},
    {"bcachefs", END(KIB(1), KIB(512), 24), MAGIC("\xc6\x85\x73\xf6\x66\xce\x90\xa9")},
    {"FAT", START(0, 510), MAGIC("\x55\xaa"), .check = check_fat},
    {"FAT12", START(0, 54), MAGIC("FAT12   ")},
    {"FAT16", START(0, 54), MAGIC("FAT16   ")},
    {"FAT32", START(0, 82), MAGIC("FAT32   ")},
    {"exFAT", START(0, 3), MAGIC("EXFAT   ")},
    {"NTFS", START(0, 3), MAGIC("NTFS    ")},
    {"ReFS", START(0, 3), MAGIC("ReFS\0\0\0\0")},
    {"HPFS", START(KIB(8), 0), MAGIC("\x49\xe8\x95\xf9\xc5\xe9\x53\xfa")},
    {"APFS", START(0, 32), MAGIC("NXSB")},
    {"HFS", START(1024, 0), MAGIC("BD"), .check = check_hfs},
    {"HFS+", START(1024, 0), MAGIC("H+"), .check = check_hfsplus},
    {"HFSX", START(1024, 0), MAGIC("HX"), .check = check_hfsplus},
    {"F2FS", START(1024, 0), MAGIC("\x10\x20\xf5\xf2")},
    {"EROFS", START(1024, 0), MAGIC("\xe2\xe1\xf5\xe0")},
    {"SquashFS", START(0, 0), MAGIC("hsqs"), .check = check_squashfs},
    {"SquashFS", START(0, 0), MAGIC("sqsh"), .check = check_squashfs_be},
    {"cramfs", START(0, 16), MAGIC("Compressed ROMFS")},
    {"romfs", START(0, 0), MAGIC("-rom1fs-")},
    {"ISO 9660", START(KIB(32), 1), MAGIC("CD001")},
    {"ISO 9660 (High Sierra)", START(KIB(32), 9), MAGIC("CDROM")},
    {"UDF", START(KIB(32), 1), MAGIC("BEA01")},
    {"UDF", START(KIB(34), 1), MAGIC("BEA01")},
    {"UDF", START(KIB(36), 1), MAGIC("BEA01")},
    {"UDF", START(KIB(32), 1), MAGIC("NSR02")},
    {"UDF", START(KIB(32), 1), MAGIC("NSR03")},
    {"JFS", START(KIB(32), 0), MAGIC("JFS1")},
    {"ReiserFS", START(KIB(8), 52), MAGIC("ReIsEr")},
    {"ReiserFS", START(KIB(64), 52), MAGIC("ReIsEr")},
    {"Reiser4", START(KIB(64), 0), MAGIC("ReIsEr4")},
    {"NILFS2", START(1024, 6), MAGIC("\x34\x34"), .check = check_nilfs},
    {"OCFS2", START(1024, 0), MAGIC("OCFSV2")},
    {"OCFS2", START(2048, 0), MAGIC("OCFSV2")},
    {"OCFS2", START(4096, 0), MAGIC("OCFSV2")},
    {"OCFS2", START(8192, 0), MAGIC("OCFSV2")},
    {"OCFS", START(0, 8), MAGIC("OracleCFS")},
    {"GFS or GFS2", START(KIB(64), 0), MAGIC("\x01\x16\x19\x70\0\0\0\x01")},
    {"UFS", START(KIB(8), 1372), MAGIC("\x54\x19\x01\x00")},
    {"UFS2", START(KIB(64), 1372), MAGIC("\x19\x01\x54\x19")},
    {"UFS2", START(KIB(8), 1372), MAGIC("\x19\x01\x54\x19")},
    {"VxFS", START(1024, 0), MAGIC("\xf5\xfc\x01\xa5")},
    {"VxFS", START(KIB(8), 0), MAGIC("\xa5\x01\xfc\xf5")},
    {"BeFS", START(512, 32), MAGIC("1SFB")},
    {"BeFS", START(0, 32), MAGIC("1SFB")},
    {"BFS", START(0, 0), MAGIC("\xce\xfa\xad\x1b")},
    {"Minix", START(1024, 16), MAGIC("\x7f\x13"), .check = check_minix},
    {"Minix", START(1024, 16), MAGIC("\x8f\x13"), .check = check_minix},
    {"Minix", START(1024, 16), MAGIC("\x68\x24"), .check = check_minix},
    {"Minix", START(1024, 16), MAGIC("\x78\x24"), .check = check_minix},
    {"Minix", START(1024, 24), MAGIC("\x5a\x4d"), .check = check_minix3},
    {"zonefs", START(0, 0), MAGIC("SFOZ")},

    /* swap: the magic ends the first page, whatever its size was on the machine that wrote it */
    SWAP_ROWS(KIB(4)),
    SWAP_ROWS(KIB(8)),
    SWAP_ROWS(KIB(16)),
    SWAP_ROWS(KIB(32)),
    SWAP_ROWS(KIB(64)),

    /* RAID, volume managers, encryption, caches, object stores */
    LVM_ROW(0),
    LVM_ROW(1),
    LVM_ROW(2),
    LVM_ROW(3),
    {"LVM1", START(0, 0), MAGIC("HM\x01\0")},
    {"LVM1", START(0, 0), MAGIC("HM\x02\0")},
    {"LVM snapshot", START(0, 0), MAGIC("SnAp\x01\0\0\0")},
    {"LUKS", START(0, 0), MAGIC("LUKS\xba\xbe")},
    LUKS2_ROW(KIB(16)),
    LUKS2_ROW(KIB(32)),
    LUKS2_ROW(KIB(64)),
    LUKS2_ROW(KIB(128)),
    LUKS2_ROW(KIB(256)),
    LUKS2_ROW(KIB(512)),
    {"BitLocker", START(0, 3), MAGIC("-FVE-FS-")},
    {"BitLocker", START(0, 3), MAGIC("MSWIN4.1\0\x02\x08\0\0\0")},
    {"dm-verity", START(0, 0), MAGIC("verity\0\0")},
    {"dm-integrity", START(0, 0), MAGIC("integrt\0")},
    {"VDO", START(0, 0), MAGIC("dmvdo001")},
    {"Stratis", START(512, 4), MAGIC("!Stra0tis\x86\xff\x02^\x41rh")},
    {"Stratis", START(9 * 512, 4), MAGIC("!Stra0tis\x86\xff\x02^\x41rh")},
    {"md RAID 1.1", START(0, 0), MAGIC("\xfc\x4e\x2b\xa9\x01\0\0\0")},
    {"md RAID 1.2", START(4096, 0), MAGIC("\xfc\x4e\x2b\xa9\x01\0\0\0")},
    {"md RAID 1.0", END(KIB(4), KIB(8), 0), MAGIC("\xfc\x4e\x2b\xa9\x01\0\0\0")},
    {"md RAID 1.0", END(KIB(4), KIB(12), 0), MAGIC("\xfc\x4e\x2b\xa9\x01\0\0\0")},
    {"md RAID 0.90", END(KIB(64), KIB(64), 0), MAGIC("\xfc\x4e\x2b\xa9\0\0\0\0")},
    {"md RAID 0.90", END(KIB(64), KIB(64), 0), MAGIC("\xa9\x2b\x4e\xfc\0\0\0\0")},
    {"DDF RAID", END(512, 512, 0), MAGIC("\xde\x11\xde\x11")},
    {"DDF RAID", END(512, 257 * 512, 0), MAGIC("\xde\x11\xde\x11")},
    {"Intel RAID", END(512, 1024, 0), MAGIC("Intel Raid ISM Cfg Sig. ")},
    {"Intel RAID", END(KIB(4), KIB(8), 0), MAGIC("Intel Raid ISM Cfg Sig. ")},
    {"LSI MegaRAID", END(512, 512, 0), MAGIC("$XIDE$")},
    {"NVIDIA RAID", END(512, 1024, 0), MAGIC("NVIDIA")},
    {"Promise RAID", END(512, 63 * 512, 0), MAGIC("Promise Technology, Inc.")},
    {"HighPoint RAID", START(9 * 512, 32), MAGIC("\xf0\x16\x78\x5a")},
    {"HighPoint RAID", START(9 * 512, 32), MAGIC("\xfd\x16\x78\x5a")},
    {"DRBD", END(KIB(4), KIB(4), 60), MAGIC("\x83\x74\x02\x6b")},
    {"DRBD", END(KIB(4), KIB(4), 60), MAGIC("\x83\x74\x02\x67")},
    {"Ceph BlueStore", START(0, 0), MAGIC("bluestore block device")},
    {"Oracle ASM", START(0, 32), MAGIC("ORCLDISK")},
    {"UBI", START(0, 0), MAGIC("UBI#")},
    {"QEMU disk image", START(0, 0), MAGIC("QFI\xfb"), .check = check_qcow},
};

#define N_ROWS (sizeof(rows) / sizeof(rows[0]))

/* False when the device is too small for the structure to be there. */
static bool row_base(const struct row *row, uint64_t size_bytes, uint64_t *base)
{
  if (row->base >= 0) {
    *base = (uint64_t)row->base;
    return true;
  }
  uint64_t end = kvio_align_down(size_bytes, row->end_block);
  uint64_t distance = (uint64_t)-row->base;
  *base = end - distance;
  return end >= distance;
}

/* ZFS keeps four labels of 256 KiB, two at each end; the second half of a label is a ring of
 * uberblocks, each of at least 1 KiB, beginning with 0x00bab10c in the byte order of the writer. */
static bool find_zfs(const struct kvio_signature_view *view, uint64_t *offset)
{
  static const uint8_t little[8] = {0x0c, 0xb1, 0xba, 0, 0, 0, 0, 0};
  static const uint8_t big[8] = {0, 0, 0, 0, 0, 0xba, 0xb1, 0x0c};
  uint64_t end = kvio_align_down(view->size_bytes, KIB(256));
  uint64_t labels[4] = {0, KIB(256), end - KIB(512), end - KIB(256)};
  if (end < KIB(1024))
    return false; /* smaller than any vdev */
  for (uint32_t i = 0; i < 4; i++) {
    for (uint64_t at = labels[i] + KIB(128); at < labels[i] + KIB(256); at += KIB(1)) {
      const uint8_t *uber = peek(view, at, 8);
      if (uber && (memcmp(uber, little, 8) == 0 || memcmp(uber, big, 8) == 0)) {
        *offset = at;
        return true;
      }
    }
  }
  return false;
}

static uint32_t add_hit(struct kvio_signature_hit *hits, uint32_t n, uint32_t max, const char *name,
                        uint64_t offset, bool table)
{
  for (uint32_t i = 0; i < n; i++)
    if (strcmp(hits[i].name, name) == 0)
      return n;
  if (n == max)
    return n;
  hits[n] = (struct kvio_signature_hit){.name = name, .offset = offset, .table = table};
  return n + 1;
}

uint32_t kvio_signature_scan(const struct kvio_signature_view *view,
                             struct kvio_signature_hit *hits, uint32_t max)
{
  uint32_t n = 0;
  uint64_t base, offset;
  KVIO_ASSERT(view->head_bytes <= view->size_bytes && view->tail_bytes <= view->size_bytes);
  for (uint32_t i = 0; i < N_ROWS; i++) {
    const struct row *row = &rows[i];
    if (!row_base(row, view->size_bytes, &base))
      continue;
    const uint8_t *found = peek(view, base + row->at, row->magic_bytes);
    if (!found || memcmp(found, row->magic, row->magic_bytes) != 0)
      continue;
    if (row->check && !row->check(view, base))
      continue;
    n = add_hit(hits, n, max, row->name, base + row->at, row->table);
  }
  if (find_zfs(view, &offset))
    n = add_hit(hits, n, max, "ZFS", offset, false);
  return n;
}
