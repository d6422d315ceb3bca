/* SPDX-License-Identifier: Apache-2.0
 *
 * The least that a batch of reads can cost through liburing, from C: what kvio's engine and its
 * Python border are measured against. Reads from /dev/zero complete inline, so the rest is overhead.
 *
 *   nop_loop PATH BLOCK_BYTES BATCH OPS FIXED
 *
 * FIXED=1 registers the file and the buffer, as kvio does. Prints nanoseconds an operation: elapsed,
 * and of processor time (which a busy machine disturbs less; this loop never sleeps).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct job {
  struct io_uring ring;
  int fd;
  bool fixed;
  char *memory;
  unsigned block, batch;
};

static uint64_t now_ns(clockid_t clock)
{
  struct timespec ts;
  clock_gettime(clock, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int fail(const char *what, int code)
{
  fprintf(stderr, "nop_loop: %s: %s\n", what, strerror(code));
  return 1;
}

/* The flags that kvio asks for; an older kernel gets the plain ring, as in kvio. */
static int open_ring(struct io_uring *ring, unsigned entries)
{
  struct io_uring_params params = {.flags = IORING_SETUP_SINGLE_ISSUER |
                                            IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG |
                                            IORING_SETUP_SUBMIT_ALL | IORING_SETUP_CQSIZE,
                                   .cq_entries = entries * 2};
  int rc = io_uring_queue_init_params(entries, ring, &params);
  if (rc != -EINVAL)
    return rc;
  memset(&params, 0, sizeof(params));
  return io_uring_queue_init_params(entries, ring, &params);
}

static int set_up(struct job *job)
{
  size_t bytes = (size_t)job->block * job->batch;
  int rc = open_ring(&job->ring, job->batch);
  if (rc)
    return fail("io_uring", -rc);
  rc = posix_memalign((void **)&job->memory, 2 << 20, bytes);
  if (rc)
    return fail("memory", rc);
  memset(job->memory, 1, bytes);
  io_uring_register_ring_fd(&job->ring);
  if (!job->fixed)
    return 0;
  struct iovec iov = {job->memory, bytes};
  rc = io_uring_register_files(&job->ring, &job->fd, 1);
  if (rc == 0)
    rc = io_uring_register_buffers(&job->ring, &iov, 1);
  return rc ? fail("registration", -rc) : 0;
}

static int run_batch(struct job *job, uint64_t first)
{
  for (unsigned i = 0; i < job->batch; i++) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&job->ring);
    char *to = job->memory + (size_t)i * job->block;
    uint64_t offset = (first + i) * job->block;
    if (job->fixed) {
      io_uring_prep_read_fixed(sqe, 0, to, job->block, offset, 0);
      sqe->flags |= IOSQE_FIXED_FILE;
    } else {
      io_uring_prep_read(sqe, job->fd, to, job->block, offset);
    }
    io_uring_sqe_set_data64(sqe, i);
  }
  for (unsigned done = 0; done < job->batch;) {
    int rc = io_uring_submit_and_wait(&job->ring, job->batch - done);
    if (rc < 0 && rc != -EINTR)
      return rc;
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;
    io_uring_for_each_cqe(&job->ring, head, cqe)
    {
      if (cqe->res != (int)job->block)
        return cqe->res < 0 ? cqe->res : -EIO;
      n++;
    }
    io_uring_cq_advance(&job->ring, n);
    done += n;
  }
  return 0;
}

int main(int argc, char **argv)
{
  if (argc != 6) {
    fprintf(stderr, "usage: nop_loop PATH BLOCK_BYTES BATCH OPS FIXED\n");
    return 2;
  }
  struct job job = {.fd = open(argv[1], O_RDONLY | O_CLOEXEC),
                    .block = (unsigned)strtoul(argv[2], NULL, 0),
                    .batch = (unsigned)strtoul(argv[3], NULL, 0),
                    .fixed = atoi(argv[5]) != 0};
  uint64_t batches = strtoull(argv[4], NULL, 0) / (job.batch ? job.batch : 1);
  if (job.fd < 0)
    return fail(argv[1], errno);
  if (job.block == 0 || job.batch == 0 || batches == 0)
    return fail("block, batch and operations", EINVAL);
  if (set_up(&job))
    return 1;
  uint64_t start = 0, cpu = 0;
  uint64_t warm = batches / 10 + 1;
  for (uint64_t i = 0; i < warm + batches; i++) {
    if (i == warm) {
      start = now_ns(CLOCK_MONOTONIC);
      cpu = now_ns(CLOCK_THREAD_CPUTIME_ID);
    }
    int rc = run_batch(&job, i % 1024 * job.batch);
    if (rc)
      return fail("read", -rc);
  }
  double ops = (double)(batches * job.batch);
  printf("%.2f %.2f\n", (double)(now_ns(CLOCK_MONOTONIC) - start) / ops,
         (double)(now_ns(CLOCK_THREAD_CPUTIME_ID) - cpu) / ops);
  return 0;
}
