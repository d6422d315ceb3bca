/* SPDX-License-Identifier: Apache-2.0
 *
 * nvme: see nvme.h. Command and structure layouts: NVM Express Base Specification and NVM Command
 * Set Specification. The meaning of a status: what Linux does with it (drivers/nvme/host/core.c,
 * nvme_error_status(), gives a block-layer status; block/blk-core.c, blk_errors[], gives the
 * errno), so that passthrough and the block device tell the same story.
 */
#include "nvme.h"

#include <linux/nvme_ioctl.h>
#include <string.h>

#define OPCODE_FLUSH 0x00
#define OPCODE_WRITE 0x01
#define OPCODE_READ 0x02
#define ADMIN_IDENTIFY 0x06
#define STATUS_MASK 0x7ff      /* type in bits 10:8, code in bits 7:0; above: retry hints */
#define STATUS_TYPE_PATH 0x300 /* type 3: path related */
#define STATUS_TYPE_MASK 0x700
#define CONTROLLER_PAGE_BYTES 4096 /* a segment of a command holds at least this much */
#define MAX_COMMAND_BYTES (UINT64_C(1) << 20)
#define UNKNOWN_COMMAND_BYTES (UINT64_C(128) << 10)

static void build(struct kvio_nvme_cmd *cmd, bool write, uint32_t nsid, uint32_t lba_shift,
                  uint64_t offset, uint64_t length)
{
  KVIO_ASSERT(lba_shift >= 9 && lba_shift <= 16);
  uint64_t block_mask = (UINT64_C(1) << lba_shift) - 1;
  KVIO_ASSERT(length != 0 && ((offset | length) & block_mask) == 0);
  KVIO_ASSERT(length >> lba_shift <= KVIO_NVME_MAX_BLOCKS && length <= UINT32_MAX);
  KVIO_ASSERT(offset + length >= offset);
  uint64_t first_block = offset >> lba_shift;
  memset(cmd, 0, sizeof(*cmd));
  cmd->opcode = write ? OPCODE_WRITE : OPCODE_READ;
  cmd->nsid = nsid;
  cmd->cdw10 = (uint32_t)first_block;
  cmd->cdw11 = (uint32_t)(first_block >> 32);
  cmd->cdw12 = (uint32_t)(length >> lba_shift) - 1;
}

void kvio_nvme_build_rw(struct kvio_nvme_cmd *cmd, bool write, uint32_t nsid, uint32_t lba_shift,
                        uint64_t offset, uint64_t length, const void *addr)
{
  build(cmd, write, nsid, lba_shift, offset, length);
  cmd->addr = (uint64_t)(uintptr_t)addr;
  cmd->data_len = (uint32_t)length;
}

void kvio_nvme_build_rwv(struct kvio_nvme_cmd *cmd, bool write, uint32_t nsid, uint32_t lba_shift,
                         uint64_t offset, uint64_t length, const struct iovec *iov, uint32_t n_iov)
{
  uint64_t total = 0;
  for (uint32_t i = 0; i < n_iov; i++)
    total += iov[i].iov_len;
  KVIO_ASSERT(total == length);
  build(cmd, write, nsid, lba_shift, offset, length);
  cmd->addr = (uint64_t)(uintptr_t)iov;
  cmd->data_len = n_iov;
}

/* Rows in the order of the status. */
static const struct status {
  uint16_t status;
  int code;
  const char *text;
} statuses[] = {
    {0x000, 0, "success"},
    {0x001, -EOPNOTSUPP, "invalid command opcode"},
    {0x002, -EOPNOTSUPP, "invalid field in command"},
    {0x004, -EIO, "data transfer error"},
    {0x006, -EIO, "internal error of the target"},
    {0x007, -EIO, "command aborted on request"},
    {0x008, -EIO, "command aborted: queue deleted"},
    {0x00b, -EOPNOTSUPP, "invalid namespace or format"},
    {0x020, -EIO, "namespace is write protected"},
    {0x021, -EREMOTEIO, "command interrupted"},
    {0x080, -EREMOTEIO, "LBA out of range"},
    {0x081, -ENOSPC, "capacity exceeded"},
    {0x082, -EREMOTEIO, "namespace not ready"},
    {0x083, -EBADE, "reservation conflict"},
    {0x180, -EOPNOTSUPP, "conflicting attributes"},
    {0x181, -EILSEQ, "invalid protection information"},
    {0x182, -ENODATA, "attempted write to a read-only range"},
    {0x183, -EOPNOTSUPP, "command size limit exceeded or command not supported"},
    {0x1bd, -EOVERFLOW, "too many active zones"},
    {0x1be, -ETOOMANYREFS, "too many open zones"},
    {0x280, -ENODATA, "write fault"},
    {0x281, -ENODATA, "unrecovered read error"},
    {0x282, -EILSEQ, "end-to-end guard check error"},
    {0x283, -EILSEQ, "end-to-end application tag check error"},
    {0x284, -EILSEQ, "end-to-end reference tag check error"},
    {0x285, -ENODATA, "compare failure"},
    {0x286, -ENODATA, "access denied"},
    {0x287, -ENODATA, "deallocated or unwritten logical block"},
    {0x300, -ENOLINK, "internal path error"},
    {0x301, -ENOLINK, "asymmetric access persistent loss"},
    {0x302, -ENOLINK, "asymmetric access inaccessible"},
    {0x303, -ENOLINK, "asymmetric access transition"},
    {0x360, -ENOLINK, "controller pathing error"},
    {0x370, -ENOLINK, "host pathing error"},
    {0x371, -ENOLINK, "command aborted by host"},
};

static const struct status *find_status(uint32_t status)
{
  for (size_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++)
    if (statuses[i].status == (status & STATUS_MASK))
      return &statuses[i];
  return NULL;
}

int kvio_nvme_status_errno(uint32_t status)
{
  const struct status *row = find_status(status);
  if (row)
    return row->code;
  /* Any path error makes a multipath head try another path. Passthrough has none to try, and the
   * errno that tells "the way there is broken" is ENOLINK. */
  return (status & STATUS_TYPE_MASK) == STATUS_TYPE_PATH ? -ENOLINK : -EIO;
}

const char *kvio_nvme_status_text(uint32_t status)
{
  const struct status *row = find_status(status);
  return row ? row->text : "unknown NVMe status";
}

/* EINVAL is what a head of several paths says when none of them is live (Linux,
 * drivers/nvme/host/ioctl.c). A command that was built here, within the limits, of a kind that the
 * open has tried, gives the kernel no other reason. It must not read as the caller's mistake. */
int64_t kvio_nvme_result(int32_t res, uint64_t length)
{
  if (res < 0)
    return res == -EINVAL ? -ENOLINK : res;
  if (res == 0)
    return (int64_t)length;
  /* A status whose type and code are 0 but which carries retry hints cannot be; never success. */
  int code = kvio_nvme_status_errno((uint32_t)res);
  return code ? code : -EIO;
}

uint32_t kvio_nvme_max_bytes(uint64_t max_hw_sectors_kb, uint64_t max_segments, uint32_t lba_shift)
{
  uint64_t limit = kvio_min_u64(MAX_COMMAND_BYTES, (uint64_t)KVIO_NVME_MAX_BLOCKS << lba_shift);
  if (max_hw_sectors_kb == 0 || max_segments == 0)
    limit = kvio_min_u64(limit, UNKNOWN_COMMAND_BYTES);
  if (max_hw_sectors_kb != 0 && max_hw_sectors_kb < limit >> 10)
    limit = max_hw_sectors_kb << 10;
  if (max_segments != 0 && max_segments < limit / CONTROLLER_PAGE_BYTES)
    limit = max_segments * CONTROLLER_PAGE_BYTES;
  while (!kvio_is_pow2(limit))
    limit &= limit - 1;
  return (uint32_t)limit;
}

static uint64_t load_le(const uint8_t *p, uint32_t bytes)
{
  uint64_t v = 0;
  for (uint32_t i = bytes; i-- > 0;)
    v = v << 8 | p[i];
  return v;
}

int kvio_nvme_parse_namespace(struct kvio_nvme_namespace *ns,
                              const uint8_t id[KVIO_NVME_IDENTIFY_BYTES])
{
  uint64_t blocks = load_le(id, 8);          /* NSZE */
  uint32_t n_formats = (uint32_t)id[25] + 1; /* NLBAF */
  uint32_t format = id[26] & 0xf;            /* FLBAS */
  if (n_formats > 16)
    format |= (uint32_t)(id[26] >> 5 & 0x3) << 4;
  const uint8_t *lbaf = id + 128 + 4 * format;
  ns->metadata_bytes = (uint32_t)load_le(lbaf, 2);
  ns->lba_shift = lbaf[2];
  ns->shared = id[30] & 1; /* NMIC */
  if (blocks == 0 || ns->lba_shift < 9 || ns->lba_shift > 16 ||
      blocks > UINT64_MAX >> ns->lba_shift)
    return -EINVAL;
  ns->size_bytes = blocks << ns->lba_shift;
  return 0;
}

/* EWOULDBLOCK is what a head of several paths says when none of them is live. */
static int ioctl_errno(void)
{
  return errno == EWOULDBLOCK ? -ENOLINK : -errno;
}

int64_t kvio_nvme_get_nsid(int fd)
{
  int nsid = ioctl(fd, NVME_IOCTL_ID);
  return nsid < 0 ? ioctl_errno() : (int64_t)(uint32_t)nsid;
}

/* An ioctl answers -1 with errno, or the status of the command. */
static int passthrough(int fd, unsigned long request, struct nvme_passthru_cmd *cmd)
{
  int rc = ioctl(fd, request, cmd);
  if (rc < 0)
    return ioctl_errno();
  return rc == 0 ? 0 : (int)kvio_nvme_result(rc, 0);
}

int kvio_nvme_identify(int fd, uint32_t nsid, struct kvio_nvme_namespace *ns)
{
  _Alignas(4096) uint8_t id[KVIO_NVME_IDENTIFY_BYTES] = {0};
  struct nvme_passthru_cmd cmd = {.opcode = ADMIN_IDENTIFY,
                                  .nsid = nsid,
                                  .addr = (uint64_t)(uintptr_t)id,
                                  .data_len = sizeof(id)};
  int rc = passthrough(fd, NVME_IOCTL_ADMIN_CMD, &cmd); /* cdw10 0 = CNS 0: this namespace */
  return rc ? rc : kvio_nvme_parse_namespace(ns, id);
}

int kvio_nvme_flush(int fd, uint32_t nsid)
{
  struct nvme_passthru_cmd cmd = {.opcode = OPCODE_FLUSH, .nsid = nsid};
  return passthrough(fd, NVME_IOCTL_IO_CMD, &cmd);
}
