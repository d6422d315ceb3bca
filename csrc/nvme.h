/* SPDX-License-Identifier: Apache-2.0
 *
 * nvme: the few NVMe facts that passthrough needs: a read or write command in the form that
 * IORING_OP_URING_CMD takes, what a completion status means, what a namespace says about itself.
 * All of it on plain memory, but for the three functions at the end, which are ioctls.
 *
 * Invariants
 *   N1  A command addresses whole logical blocks; offset, length and limit are asserted.
 *   N2  A status never becomes success by being unknown: unknown is -EIO.
 */
#ifndef KVIO_NVME_H
#define KVIO_NVME_H

#include <sys/ioctl.h>
#include <sys/uio.h>

#include "base.h"

/* The layout of struct nvme_uring_cmd; our own, since older kernel headers lack it. */
struct kvio_nvme_cmd {
  uint8_t opcode;
  uint8_t flags;
  uint16_t reserved1;
  uint32_t nsid;
  uint32_t cdw2, cdw3;
  uint64_t metadata;
  uint64_t addr;
  uint32_t metadata_len;
  uint32_t data_len; /* bytes; of the vectored form: how many iovecs */
  uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
  uint32_t timeout_ms;
  uint32_t reserved2;
};
_Static_assert(sizeof(struct kvio_nvme_cmd) == 72, "struct nvme_uring_cmd is 72 bytes");

/* sqe->cmd_op */
#define KVIO_NVME_URING_CMD_IO ((uint32_t)_IOWR('N', 0x80, struct kvio_nvme_cmd))
#define KVIO_NVME_URING_CMD_IO_VEC ((uint32_t)_IOWR('N', 0x81, struct kvio_nvme_cmd))

#define KVIO_NVME_MAX_BLOCKS 65536 /* the block count is 16 bits, less one */
#define KVIO_NVME_IDENTIFY_BYTES 4096

struct kvio_nvme_namespace {
  uint64_t size_bytes;
  uint32_t lba_shift;
  uint32_t metadata_bytes; /* of each logical block; kvio handles 0 only */
  bool shared;             /* may be attached to several controllers at once */
};

/* Fills a read or write of [offset, offset + length) bytes at addr. */
void kvio_nvme_build_rw(struct kvio_nvme_cmd *cmd, bool write, uint32_t nsid, uint32_t lba_shift,
                        uint64_t offset, uint64_t length, const void *addr);

/* The same over several buffers that hold length bytes together (KVIO_NVME_URING_CMD_IO_VEC). */
void kvio_nvme_build_rwv(struct kvio_nvme_cmd *cmd, bool write, uint32_t nsid, uint32_t lba_shift,
                         uint64_t offset, uint64_t length, const struct iovec *iov, uint32_t n_iov);

/* What a completion's res means: length on success (the kernel says 0), else -errno. A positive
 * res is an NVMe status; a negative one comes from the kernel (-EINTR: the controller was reset
 * under the command), and -EINVAL becomes -ENOLINK: no path to the namespace is live. */
int64_t kvio_nvme_result(int32_t res, uint64_t length);

/* A status (type and code, bits 10:0 of a status field without its phase bit) as -errno: what the
 * Linux block layer gives for the same status. 0 for success. */
int kvio_nvme_status_errno(uint32_t status);

/* A few words for the statuses that the table knows, "unknown NVMe status" for others. */
const char *kvio_nvme_status_text(uint32_t status);

/* Largest passthrough command: the kernel does not split these, it refuses them. Zeros (sysfs did
 * not say) give 128 KiB. A power of two, at most 1 MiB. */
uint32_t kvio_nvme_max_bytes(uint64_t max_hw_sectors_kb, uint64_t max_segments, uint32_t lba_shift);

/* Reads an Identify Namespace structure. 0, or -EINVAL when it makes no sense. */
int kvio_nvme_parse_namespace(struct kvio_nvme_namespace *ns,
                              const uint8_t id[KVIO_NVME_IDENTIFY_BYTES]);

/* ioctls on a namespace's character device. Return 0 (get_nsid: the id) or -errno; -ENOLINK when no
 * path to the namespace is live. */
int64_t kvio_nvme_get_nsid(int fd);
int kvio_nvme_identify(int fd, uint32_t nsid, struct kvio_nvme_namespace *ns);
int kvio_nvme_flush(int fd, uint32_t nsid);

#endif
