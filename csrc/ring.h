/* SPDX-License-Identifier: Apache-2.0
 *
 * ring: one io_uring. The only file that includes liburing. Knows nothing of devices or pages: a
 * file is an index into the ring's registered table, a request is a 64-bit token.
 *
 * States   DISABLED -(kvio_ring_enable)-> READY -(submit fails for good)-> POISONED
 *          POISONED -(kvio_ring_take_unsubmitted, completions reaped)-> READY
 *          any -(kvio_ring_close)-> gone for us; the kernel frees it after its last request
 *
 * Invariants
 *   R1  Only the thread that enabled the ring prepares, submits and registers (SINGLE_ISSUER).
 *   R2  At most cq_entries requests are in flight, so the completion queue cannot overflow.
 *   R3  After a failed submit no SQE that the kernel did not take stays in the queue: its token is
 *       handed back by kvio_ring_take_unsubmitted(), never sent later.
 *   R4  Completions of a DEFER_TASKRUN ring appear only while its issuer is inside the kernel, so
 *       nobody else can wait for them. A ring that is given up with requests in flight is closed;
 *       the kernel drops its registered files when the last request is over, and the last of
 *       these files is the write end of a pipe that nobody else holds: its read end tells.
 *   R5  The SQE of a big ring is not written again before its request is over: Linux 6.10 to 6.13
 *       reads the SQE of a passthrough command once more when the first try found no free tag or a
 *       frozen queue, and by then would find another command there, report success, and leave the
 *       caller's buffer as it was. Its place is the lower half of its token, an index below
 *       `entries - 1` (all ones: the wake-up), which the owner does not reuse while it is in flight.
 */
#ifndef KVIO_RING_H
#define KVIO_RING_H

#include <sys/uio.h>

#include "base.h"

struct kvio_ring;

struct kvio_ring_opts {
  uint32_t entries;
  bool big; /* 128-byte SQEs and 32-byte CQEs, for NVMe passthrough */
  bool iopoll;
  bool sqpoll;
  /* A thread of its own, that ends with the ring, uses it: the ring is made disabled, that thread
   * enables it. Otherwise the ring's descriptor is not registered: such a registration holds the
   * ring until that thread ends, whoever closes it. */
  bool own_thread;
};

struct kvio_ring_caps {
  uint32_t flags; /* IORING_SETUP_* that the kernel granted */
  bool files;     /* registered file table */
  bool ring_fd;   /* registered ring descriptor */
  bool buffers;   /* sparse table of registered buffers */
};

struct kvio_completion {
  uint64_t token;
  int32_t res;
};

/* Tries the setup flags from the best to none. 0, or -errno of the plainest attempt. */
int kvio_ring_create(struct kvio_ring **out, const struct kvio_ring_opts *opts);
/* Called once, by the thread that will use the ring (R1), before anything else. */
int kvio_ring_enable(struct kvio_ring *ring);
/* Nothing may be in flight. In the ring's own thread the members are let go at once, and -1 comes
 * back. From another thread the kernel does that some time later (tens of ms): then a descriptor
 * comes back that reads end of file when it is done (R4). */
int kvio_ring_destroy(struct kvio_ring *ring);
/* Closes the ring with requests in flight, from any thread. Returns a descriptor that reads end of
 * file once the kernel is done with all of them (R4); then the ring object is gone. -EOPNOTSUPP,
 * and nothing changes, where the kernel has no registered files. */
int kvio_ring_close(struct kvio_ring *ring);
const struct kvio_ring_caps *kvio_ring_caps(const struct kvio_ring *ring);

/* Registers fds as files 0..n-1; without kernel support requests carry the plain descriptor. */
void kvio_ring_set_files(struct kvio_ring *ring, const int *fds, uint32_t n);

/* Fills or clears (iov_base NULL) entry `slot` of the buffer table. */
int kvio_ring_set_buffer(struct kvio_ring *ring, uint32_t slot, const struct iovec *iov);

/* Each returns false when the submission queue is full. buffer_slot < 0: plain memory. */
bool kvio_ring_prep_rw(struct kvio_ring *ring, bool write, uint32_t file, void *addr,
                       uint32_t length, uint64_t offset, int buffer_slot, uint64_t token);
bool kvio_ring_prep_rwv(struct kvio_ring *ring, bool write, uint32_t file, const struct iovec *iov,
                        uint32_t n_iov, uint64_t offset, uint64_t token);
/* An NVMe command for a character device; cmd is copied into the SQE's 80-byte command area. */
bool kvio_ring_prep_cmd(struct kvio_ring *ring, uint32_t file, uint32_t cmd_op, const void *cmd,
                        size_t cmd_size, int buffer_slot, uint64_t token);
/* A read of 8 bytes from an eventfd (a plain descriptor, not a file of the table). */
bool kvio_ring_prep_wake(struct kvio_ring *ring, int event_fd, uint64_t *value, uint64_t token);

/* Submits what is prepared and waits for wait_nr completions, at most timeout_ns (UINT64_MAX =
 * no limit). 0; -ETIME; -EINTR; or another -errno: then the ring is POISONED (R3). */
int kvio_ring_submit_wait(struct kvio_ring *ring, uint32_t wait_nr, uint64_t timeout_ns);

/* Completions that are there, at most max. Never blocks. */
uint32_t kvio_ring_reap(struct kvio_ring *ring, struct kvio_completion *out, uint32_t max);

/* Takes back SQEs that the kernel has not consumed; their tokens go to out. */
uint32_t kvio_ring_take_unsubmitted(struct kvio_ring *ring, uint64_t *out, uint32_t max);

#endif
