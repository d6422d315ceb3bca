/* SPDX-License-Identifier: Apache-2.0
 *
 * kvio: striped, parallel, direct I/O over N namespaces. The only header that bindings and other
 * programs include. Functions return 0, a count, or -errno; what happened and where is in
 * struct kvio_error. See docs/internals.md for the life of a batch.
 */
#ifndef KVIO_H
#define KVIO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define KVIO_MAX_MEMBERS 256
#define KVIO_STRIPED (-1)      /* kvio_op.member: address the striped volume */
#define KVIO_PENDING INT64_MIN /* kvio_batch_results(): not finished */
#define KVIO_NO_DEADLINE 0

enum kvio_direct { KVIO_DIRECT_REQUIRE, KVIO_DIRECT_PREFER, KVIO_DIRECT_OFF };
enum kvio_engine {
  KVIO_ENGINE_AUTO,
  KVIO_ENGINE_URING,
  KVIO_ENGINE_THREADS,
  KVIO_ENGINE_URING_CMD
};
enum kvio_opcode {
  KVIO_READ,
  KVIO_WRITE,
  KVIO_FLUSH,
  KVIO_DISCARD,
  KVIO_OPEN, /* from here: in errors only */
  KVIO_CLOSE,
  KVIO_REGISTER,
  KVIO_UNREGISTER
};
enum kvio_unaligned { KVIO_UNALIGNED_BOUNCE, KVIO_UNALIGNED_REFUSE };
enum kvio_hugepages { KVIO_HUGE_AUTO, KVIO_HUGE_REQUIRE, KVIO_HUGE_OFF };

/* Classes of failure, by what the Linux block layer means by an errno. */
enum kvio_error_class {
  KVIO_CLASS_NONE,
  KVIO_CLASS_MEDIA,       /* ENODATA */
  KVIO_CLASS_TIMEOUT,     /* ETIMEDOUT: the block layer or the target gave up */
  KVIO_CLASS_DEADLINE,    /* ETIME: kvio's own deadline */
  KVIO_CLASS_PROTECTION,  /* EILSEQ */
  KVIO_CLASS_RESERVATION, /* EBADE: another host holds the reservation */
  KVIO_CLASS_TRANSPORT,   /* ENOLINK */
  KVIO_CLASS_TARGET,      /* EREMOTEIO */
  KVIO_CLASS_GONE,        /* ENODEV, ENXIO */
  KVIO_CLASS_SPACE,       /* ENOSPC, EDQUOT */
  KVIO_CLASS_USAGE,       /* EINVAL, EFAULT, EBADF, EROFS, EBUSY: the caller's */
  KVIO_CLASS_SHUTDOWN,    /* ESHUTDOWN, ECANCELED: closed under the caller */
  KVIO_CLASS_UNSUPPORTED, /* EOPNOTSUPP, ENOSYS */
  KVIO_CLASS_UNKNOWN,     /* EIO and the rest */
};

struct kvio_error {
  int code;        /* negative errno, 0 = none */
  int member;      /* index, or -1 */
  uint64_t offset; /* bytes on the member (or in the volume when member is -1) */
  uint64_t length; /* bytes */
  enum kvio_opcode op;
  char message[640];
};

enum kvio_error_class kvio_error_classify(int code);
const char *kvio_error_class_name(enum kvio_error_class cls);

/* ---- memory ------------------------------------------------------------------------------ */

enum kvio_huge_granted { KVIO_PAGES_4K, KVIO_PAGES_THP, KVIO_PAGES_HUGETLB };

struct kvio_memory {
  void *addr;
  size_t size_bytes; /* what was mapped: nbytes rounded up to the page size that was granted */
  enum kvio_huge_granted granted;
};

/* Maps zeroed memory that a forked child does not inherit: hugetlb pages, then transparent huge
 * pages, then 4 KiB pages (KVIO_HUGE_REQUIRE stops after hugetlb). Returns 0 or -errno. */
int kvio_memory_map(struct kvio_memory *mem, size_t nbytes, enum kvio_hugepages want);
void kvio_memory_unmap(struct kvio_memory *mem);

/* ---- volume ------------------------------------------------------------------------------ */

struct kvio_volume;
struct kvio_batch;

struct kvio_volume_opts {
  const char *const *paths;
  uint32_t n_paths;
  bool write;
  bool allow_destroy;
  bool iopoll;
  bool sqpoll;
  enum kvio_direct direct;
  enum kvio_engine engine;
  enum kvio_unaligned unaligned;
  uint64_t stripe_unit;        /* bytes, a multiple of the alignment of all members */
  uint32_t queue_depth;        /* I/Os in flight per member and lane */
  uint32_t max_inflight;       /* I/Os in flight per lane; 0 = queue_depth * members */
  uint64_t max_inflight_bytes; /* bytes in flight per lane; 0 = no cap */
  uint32_t submit_batch;       /* completions to gather before the next submission; 0 = adaptive */
  uint32_t workers;            /* 0 = by the number of members and processors */
  uint32_t io_threads;         /* of the preadv2/pwritev2 engine, flush and discard; 0 = 16 */
  uint64_t deadline_ns;        /* of every batch; KVIO_NO_DEADLINE = none */
};

/* Asked about every 100 ms while a call blocks; a value other than 0 ends the call. */
typedef int (*kvio_interrupt_fn)(void *arg);

/* Fills *opts with the defaults. */
void kvio_volume_opts_init(struct kvio_volume_opts *opts);

/* Opens all members, probes each with a real read, picks its engine. 0 or -errno with *err. */
int kvio_volume_open(struct kvio_volume **out, const struct kvio_volume_opts *opts,
                     struct kvio_error *err);

/* Refuses new work, waits up to timeout_ns for what is in flight, stops the threads and closes the
 * members. -ETIME when I/O was still in flight: then its memory and file descriptors are leaked on
 * purpose, since the kernel may still write there. -EINTR when interrupt asked to wait no longer: closed
 * or leaked, as it came out. Idempotent. */
int kvio_volume_close(struct kvio_volume *vol, uint64_t timeout_ns, kvio_interrupt_fn interrupt,
                      void *interrupt_arg, struct kvio_error *err);

/* Frees a closed volume. Every batch of it must have been put. After a close that timed out, or in
 * a forked child, this leaks what the kernel or the parent may still use. */
void kvio_volume_free(struct kvio_volume *vol);

struct kvio_member_info {
  const char *path;
  const char *identity;      /* NGUID, EUI-64 or UUID, "" when it has none */
  const char *engine_reason; /* why this engine */
  enum kvio_engine engine;
  uint64_t size_bytes;
  uint32_t logical_block, physical_block, mem_align, offset_align, write_align;
  uint32_t max_io_bytes;             /* largest command, memory in huge pages */
  uint32_t max_io_bytes_small_pages; /* the same for other memory */
  bool direct, nowait_read, volatile_cache, can_discard, sparse;
  const char *overridden; /* what allow_destroy overrode, one reason a line; "" = nothing */
};

struct kvio_volume_info {
  uint64_t size_bytes;
  uint64_t stripe_unit;
  uint32_t n_members;
  uint32_t read_align;  /* bytes, of offset and length */
  uint32_t write_align; /* bytes, of offset and length */
  uint32_t mem_align;   /* bytes, of a buffer address */
  uint32_t queue_depth, max_inflight, workers, io_threads;
  bool write;
  bool uring;          /* io_uring was granted */
  int uring_errno;     /* why not, 0 when granted */
  uint32_t ring_flags; /* IORING_SETUP_* granted */
  bool registered_files;
  bool registered_buffers; /* the kernel has the sparse buffer table */
  int register_errno;      /* of the last buffer registration that was refused, 0 = none */
  uint32_t regions;        /* memory regions registered now */
};

void kvio_volume_info(const struct kvio_volume *vol, struct kvio_volume_info *info);
int kvio_volume_member(const struct kvio_volume *vol, uint32_t index,
                       struct kvio_member_info *info);

/* One operation: a contiguous range of the volume (member = KVIO_STRIPED) or of one member, to or
 * from a list of buffers. FLUSH takes a member, or KVIO_STRIPED for all of them, and no buffers.
 * DISCARD takes its length from iov[0].iov_len. */
struct kvio_op {
  uint64_t offset;
  const struct iovec *iov;
  uint32_t iovcnt;
  int32_t member;
};

/* Submits ops as one batch. The buffers must stay valid until the engine has let go of the batch:
 * `owner` (may be NULL) is handed back by kvio_volume_reclaim() at that moment, unless
 * kvio_batch_take_owner() took it before. deadline_ns is relative, KVIO_NO_DEADLINE = none.
 * Returns 0 and *out, or -errno with *err and nothing submitted. */
int kvio_volume_submit(struct kvio_volume *vol, enum kvio_opcode opcode, const struct kvio_op *ops,
                       uint32_t n_ops, uint64_t deadline_ns, void *owner, struct kvio_batch **out,
                       struct kvio_error *err);

/* The same, and waits; on the calling thread's own ring when there is no deadline. Returns 0 when
 * the batch is done or its deadline passed, -EINTR when interrupt_fn asked to stop. */
int kvio_volume_run(struct kvio_volume *vol, enum kvio_opcode opcode, const struct kvio_op *ops,
                    uint32_t n_ops, uint64_t deadline_ns, void *owner, kvio_interrupt_fn interrupt,
                    void *interrupt_arg, struct kvio_batch **out, struct kvio_error *err);

bool kvio_batch_done(const struct kvio_batch *batch);

/* 0 = done or deadline passed, -ETIME = timeout_ns passed (UINT64_MAX = wait for ever), -EINTR,
 * -EPERM = in a forked child, where nobody will ever finish it. */
int kvio_batch_wait(struct kvio_batch *batch, uint64_t timeout_ns, kvio_interrupt_fn interrupt,
                    void *interrupt_arg);

/* Bytes or -errno for each op; KVIO_PENDING where unfinished. Returns the number of failed ops. */
uint32_t kvio_batch_results(const struct kvio_batch *batch, int64_t *out);
uint32_t kvio_batch_size(const struct kvio_batch *batch);

/* What happened to op i: member, offset on it, class, message. Returns its code (0 = no error). */
int kvio_batch_error(const struct kvio_batch *batch, uint32_t i, struct kvio_error *err);

/* An eventfd that becomes readable when the batch is done; made on the first call. -errno. */
int kvio_batch_eventfd(struct kvio_batch *batch);

/* For event loops that wait for many batches: one eventfd for all of them. A batch reports to a
 * notifier once (-EBUSY the second time); its tag comes out of kvio_notifier_take(), which returns
 * how many there were, after the eventfd became readable. A notifier lives until it is put and no
 * batch will report to it any more. */
struct kvio_notifier;
int kvio_notifier_create(struct kvio_notifier **out);
void kvio_notifier_put(struct kvio_notifier *notifier);
int kvio_notifier_fd(const struct kvio_notifier *notifier);
uint32_t kvio_notifier_take(struct kvio_notifier *notifier, uint64_t *tags, uint32_t max);
int kvio_batch_notify(struct kvio_batch *batch, struct kvio_notifier *notifier, uint64_t tag);

/* The owner, when the engine has let go of all buffers; NULL otherwise (it comes by reclaim). */
void *kvio_batch_take_owner(struct kvio_batch *batch);
void kvio_batch_put(struct kvio_batch *batch);

/* Owners whose buffers the engine has let go of since the last call; returns how many. */
uint32_t kvio_volume_reclaim(struct kvio_volume *vol, void **owners, uint32_t max);
bool kvio_volume_has_reclaim(const struct kvio_volume *vol);

/* Registers memory with every ring of the volume (at most 1 GiB a slice, 64 slices). I/O on it uses
 * READ_FIXED/WRITE_FIXED. huge: it lies in huge pages, so commands on it may be larger (the block
 * layer counts pages that are not contiguous). -ENOMEM when RLIMIT_MEMLOCK refuses: I/O then works
 * unregistered. */
int kvio_volume_register(struct kvio_volume *vol, void *addr, size_t nbytes, bool huge,
                         struct kvio_error *err);
int kvio_volume_unregister(struct kvio_volume *vol, void *addr);

/* ---- statistics: cumulative since open ----------------------------------------------------- */

#define KVIO_HIST_BUCKETS 1216

struct kvio_hist_snapshot {
  uint64_t count, min_ns, max_ns, sum_ns;
  double sum_squares;
  uint64_t buckets[KVIO_HIST_BUCKETS];
};

struct kvio_io_stats {
  uint64_t ops, bytes, errors;
  struct kvio_hist_snapshot latency;
};

struct kvio_member_stats {
  struct kvio_io_stats io[2]; /* KVIO_READ, KVIO_WRITE: commands to the member */
  uint64_t flushes, discards, retries, in_flight;
  uint32_t deadline_strikes; /* deadlines passed since the last success */
};

struct kvio_volume_stats {
  struct kvio_io_stats io[2]; /* operations as the caller sees them */
  uint64_t retries, short_reads, bounced, fixed_ops, unfixed_ops, direct_ops, stale_completions;
  uint64_t deadline_exceeded, poisoned_rings;
  uint64_t quarantined_buffers, quarantined_bytes; /* now, not cumulative */
  uint32_t lanes, workers, io_threads;
};

/* Lower bound in ns of histogram bucket i (what percentiles are computed from). */
uint64_t kvio_hist_lower_ns(uint32_t i);

/* 0; -EPERM in a forked child; -EINVAL for a member that is not there. */
int kvio_volume_stats(struct kvio_volume *vol, struct kvio_volume_stats *out);
int kvio_volume_member_stats(struct kvio_volume *vol, uint32_t index,
                             struct kvio_member_stats *out);

/* ---- looking at one path, without a volume --------------------------------------------------- */

struct kvio_inspection {
  const char *kind; /* "block", "file", "zero", "nvme-char" */
  uint64_t size_bytes;
  uint32_t logical_block, physical_block, mem_align, offset_align, write_align, max_io_bytes;
  bool direct, nowait_read, volatile_cache, can_discard, sparse;
  char identity[80];
};

/* Opens the path read-only, looks, closes it again. 0 or -errno with *err. */
int kvio_inspect(const char *path, struct kvio_inspection *out, struct kvio_error *err);

/* Would a write to this path destroy something? *reasons: KVIO_UNSAFE_* of safety.h, 0 = nothing
 * found; text: one reason a line. root is a prefix for /sys and /proc ("" on a live system).
 * Returns 0, or -errno when the path cannot be looked at. */
int kvio_verdict(const char *path, const char *root, uint32_t *reasons, char *text,
                 size_t text_size);

#endif
