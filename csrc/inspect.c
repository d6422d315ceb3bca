/* SPDX-License-Identifier: Apache-2.0
 *
 * Public face of device and safety for one path (kvio.h).
 */
#include <stdio.h>
#include <string.h>

#include "device.h"
#include "safety.h"

int kvio_inspect(const char *path, struct kvio_inspection *out, struct kvio_error *err)
{
  static const char *const kinds[] = {[KVIO_DEVICE_BLOCK] = "block",
                                      [KVIO_DEVICE_FILE] = "file",
                                      [KVIO_DEVICE_ZERO] = "zero",
                                      [KVIO_DEVICE_NVME_CHAR] = "nvme-char"};
  struct kvio_device_opts opts = {.path = path, .direct = KVIO_DIRECT_PREFER};
  struct kvio_device dev;
  int rc = kvio_device_open(&dev, &opts, err);
  if (rc)
    return rc;
  *out = (struct kvio_inspection){.kind = kinds[dev.kind],
                                  .size_bytes = dev.size_bytes,
                                  .logical_block = dev.logical_block,
                                  .physical_block = dev.physical_block,
                                  .mem_align = dev.mem_align,
                                  .offset_align = dev.offset_align,
                                  .write_align = dev.write_align,
                                  .max_io_bytes = dev.max_io_bytes,
                                  .direct = dev.direct,
                                  .nowait_read = dev.nowait_read,
                                  .volatile_cache = dev.volatile_cache,
                                  .can_discard = dev.can_discard,
                                  .sparse = dev.sparse};
  memcpy(out->identity, dev.identity, sizeof(out->identity));
  kvio_device_close(&dev);
  return 0;
}

int kvio_verdict(const char *path, const char *root, uint32_t *reasons, char *text,
                 size_t text_size)
{
  struct kvio_verdict verdict;
  int rc = kvio_safety_inspect(path, root, &verdict);
  if (rc)
    return rc;
  *reasons = verdict.reasons;
  snprintf(text, text_size, "%s", verdict.text);
  return 0;
}
