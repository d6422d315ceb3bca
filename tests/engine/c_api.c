/* SPDX-License-Identifier: Apache-2.0
 *
 * The core without Python: what the header promises, from the only header that programs include.
 *
 *   c_api MEMBER...     writes a pattern, flushes, reads it back in three ways, prints "ok"
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvio.h"

#define PAGE ((size_t)256 << 10)
#define PAGES 8

static int fail(const char *what, int rc, const struct kvio_error *err)
{
  fprintf(stderr, "%s: %d: %s\n", what, rc, err->message);
  return 1;
}

static int check(const unsigned char *bytes, const char *what)
{
  for (size_t i = 0; i < PAGES * PAGE; i++)
    if (bytes[i] != (unsigned char)(i / 512 * 7 + i)) {
      fprintf(stderr, "%s: byte %zu is wrong\n", what, i);
      return 1;
    }
  return 0;
}

int main(int argc, char **argv)
{
  struct kvio_volume_opts opts;
  struct kvio_volume *vol;
  struct kvio_error err;
  struct kvio_memory mem;
  struct kvio_batch *batch;
  struct iovec iov[PAGES];
  struct kvio_op ops[PAGES];
  int64_t results[PAGES];
  kvio_volume_opts_init(&opts);
  opts.paths = (const char *const *)argv + 1;
  opts.n_paths = (uint32_t)argc - 1;
  opts.write = true;
  opts.direct = KVIO_DIRECT_PREFER;
  opts.stripe_unit = 64 << 10;
  int rc = kvio_volume_open(&vol, &opts, &err);
  if (rc)
    return fail("open", rc, &err);
  rc = kvio_memory_map(&mem, PAGES * PAGE, KVIO_HUGE_AUTO);
  if (rc)
    return fail("memory", rc, &err);
  rc = kvio_volume_register(vol, mem.addr, mem.size_bytes, mem.granted != KVIO_PAGES_4K, &err);
  if (rc && rc != -ENOMEM)
    return fail("register", rc, &err);
  unsigned char *bytes = mem.addr;
  for (size_t i = 0; i < PAGES * PAGE; i++)
    bytes[i] = (unsigned char)(i / 512 * 7 + i);
  for (int i = 0; i < PAGES; i++) {
    iov[i] = (struct iovec){bytes + i * PAGE, PAGE};
    ops[i] =
        (struct kvio_op){.offset = i * PAGE, .iov = &iov[i], .iovcnt = 1, .member = KVIO_STRIPED};
  }
  rc = kvio_volume_run(vol, KVIO_WRITE, ops, PAGES, KVIO_NO_DEADLINE, NULL, NULL, NULL, &batch,
                       &err);
  if (rc || kvio_batch_results(batch, results) != 0)
    return fail("write", rc, &err);
  kvio_batch_put(batch);
  struct kvio_op flush = {.member = KVIO_STRIPED};
  rc =
      kvio_volume_run(vol, KVIO_FLUSH, &flush, 1, KVIO_NO_DEADLINE, NULL, NULL, NULL, &batch, &err);
  if (rc || kvio_batch_results(batch, results) != 0)
    return fail("flush", rc, &err);
  kvio_batch_put(batch);

  uint64_t deadlines[] = {KVIO_NO_DEADLINE, 10000000000u};
  for (int way = 0; way < 2; way++) {
    memset(bytes, 0, PAGES * PAGE);
    rc =
        kvio_volume_run(vol, KVIO_READ, ops, PAGES, deadlines[way], NULL, NULL, NULL, &batch, &err);
    if (rc || kvio_batch_results(batch, results) != 0)
      return fail("read", rc, &err);
    kvio_batch_put(batch);
    if (check(bytes, way ? "with a deadline" : "blocking"))
      return 1;
  }
  memset(bytes, 0, PAGES * PAGE);
  int owner;
  rc = kvio_volume_submit(vol, KVIO_READ, ops, PAGES, KVIO_NO_DEADLINE, &owner, &batch, &err);
  if (rc || kvio_batch_wait(batch, UINT64_MAX, NULL, NULL) != 0)
    return fail("submit", rc, &err);
  if (kvio_batch_results(batch, results) != 0 || kvio_batch_size(batch) != PAGES)
    return fail("results", (int)results[0], &err);
  if (kvio_batch_take_owner(batch) != &owner)
    return fail("the owner does not come back", 0, &err);
  kvio_batch_put(batch);
  if (check(bytes, "submitted"))
    return 1;

  struct kvio_volume_stats *stats = malloc(sizeof(*stats));
  if (!stats || kvio_volume_stats(vol, stats) != 0 || stats->io[KVIO_READ].ops != 3 * PAGES ||
      stats->io[KVIO_READ].bytes != 3 * PAGES * PAGE)
    return fail("statistics", 0, &err);
  free(stats);
  ops[0].offset = UINT64_MAX;
  rc = kvio_volume_run(vol, KVIO_READ, ops, 1, KVIO_NO_DEADLINE, NULL, NULL, NULL, &batch, &err);
  if (rc != -EINVAL || !strstr(err.message, "2^63"))
    return fail("a wrong offset is not refused", rc, &err);
  rc = kvio_volume_unregister(vol, mem.addr);
  if (rc)
    return fail("unregister", rc, &err);
  rc = kvio_volume_close(vol, 10000000000u, NULL, NULL, &err);
  if (rc)
    return fail("close", rc, &err);
  kvio_volume_free(vol);
  kvio_memory_unmap(&mem);
  puts("ok");
  return 0;
}
