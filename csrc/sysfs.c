/* SPDX-License-Identifier: Apache-2.0
 *
 * sysfs: see sysfs.h. Nothing here keeps state: each call reads what the kernel says now.
 */
#include "sysfs.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define DELETED_SUFFIX " (deleted)" /* the kernel's mark on the path of an unlinked file */

static int read_text(char *out, size_t out_bytes, const char *path)
{
  KVIO_ASSERT(out_bytes > 0);
  out[0] = '\0';
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return -errno;
  ssize_t n;
  do
    n = read(fd, out, out_bytes - 1);
  while (n < 0 && errno == EINTR);
  int rc = n < 0 ? -errno : 0;
  close(fd);
  if (rc) {
    out[0] = '\0';
    return rc;
  }
  while (n > 0 && (out[n - 1] == '\n' || out[n - 1] == ' '))
    n--;
  out[n] = '\0';
  return 0;
}

/* Formats a path; false when it does not fit. */
static bool format_path(char path[PATH_MAX], const char *fmt, va_list args)
{
  int n = vsnprintf(path, PATH_MAX, fmt, args);
  return n >= 0 && n < PATH_MAX;
}

int kvio_sysfs_text(char *out, size_t out_bytes, const char *fmt, ...)
{
  char path[PATH_MAX];
  va_list args;
  va_start(args, fmt);
  bool fits = format_path(path, fmt, args);
  va_end(args);
  out[0] = '\0';
  return fits ? read_text(out, out_bytes, path) : -ENAMETOOLONG;
}

static int parse_u64(uint64_t *out, const char *text)
{
  char *end;
  errno = 0;
  unsigned long long v = strtoull(text, &end, 10);
  if (errno || end == text || (*end != '\0' && *end != '\n' && *end != ' '))
    return -EINVAL;
  *out = v;
  return 0;
}

int kvio_sysfs_u64(uint64_t *out, const char *fmt, ...)
{
  char path[PATH_MAX], text[64];
  va_list args;
  va_start(args, fmt);
  bool fits = format_path(path, fmt, args);
  va_end(args);
  if (!fits)
    return -ENAMETOOLONG;
  int rc = read_text(text, sizeof(text), path);
  return rc ? rc : parse_u64(out, text);
}

bool kvio_sysfs_exists(const char *fmt, ...)
{
  char path[PATH_MAX];
  va_list args;
  va_start(args, fmt);
  bool fits = format_path(path, fmt, args);
  va_end(args);
  return fits && access(path, F_OK) == 0;
}

/* The name that /dev uses: DEVNAME of the uevent file, else the last part of the directory. */
static void read_name(char name[KVIO_SYSFS_NAME_MAX], const char *dir)
{
  char uevent[1024];
  const char *slash = strrchr(dir, '/');
  snprintf(name, KVIO_SYSFS_NAME_MAX, "%.*s", KVIO_SYSFS_NAME_MAX - 1, slash ? slash + 1 : dir);
  if (kvio_sysfs_text(uevent, sizeof(uevent), "%s/uevent", dir))
    return;
  const char *found = strstr(uevent, "DEVNAME=");
  if (!found || (found != uevent && found[-1] != '\n'))
    return;
  found += strlen("DEVNAME=");
  snprintf(name, KVIO_SYSFS_NAME_MAX, "%.*s", (int)strcspn(found, "\n"), found);
}

int kvio_sysfs_dev(dev_t *rdev, const char *dir)
{
  char text[32];
  unsigned int major_no, minor_no;
  int rc = kvio_sysfs_text(text, sizeof(text), "%s/dev", dir);
  if (rc)
    return rc;
  if (sscanf(text, "%u:%u", &major_no, &minor_no) != 2)
    return -EINVAL;
  *rdev = makedev(major_no, minor_no);
  return 0;
}

int kvio_sysfs_block_find(struct kvio_sysfs_block *block, const char *root, dev_t rdev)
{
  char link[PATH_MAX];
  uint64_t sectors = 0;
  memset(block, 0, sizeof(*block));
  int n = snprintf(link, sizeof(link), "%s/sys/dev/block/%u:%u", root, major(rdev), minor(rdev));
  if (n < 0 || n >= (int)sizeof(link))
    return -ENAMETOOLONG;
  if (!realpath(link, block->dir))
    return -errno;

  block->rdev = block->disk = rdev;
  read_name(block->name, block->dir);
  if (kvio_sysfs_u64(&sectors, "%s/size", block->dir) == 0)
    block->size_bytes = sectors * KVIO_SECTOR_BYTES;
  memcpy(block->disk_dir, block->dir, sizeof(block->disk_dir));
  memcpy(block->disk_name, block->name, sizeof(block->disk_name));

  block->partition = kvio_sysfs_exists("%s/partition", block->dir);
  if (!block->partition)
    return 0;
  char *slash = strrchr(block->disk_dir, '/');
  if (!slash || slash == block->disk_dir)
    return -ENOENT;
  *slash = '\0'; /* sysfs puts a partition inside its disk */
  read_name(block->disk_name, block->disk_dir);
  int rc = kvio_sysfs_dev(&block->disk, block->disk_dir);
  if (rc)
    return rc;
  rc = kvio_sysfs_u64(&sectors, "%s/start", block->dir);
  if (rc)
    return rc;
  block->start_bytes = sectors * KVIO_SECTOR_BYTES;
  return 0;
}

int kvio_sysfs_generic_sibling(dev_t *rdev, char name[KVIO_SYSFS_NAME_MAX], const char *root,
                               dev_t generic)
{
  char link[PATH_MAX], dir[PATH_MAX], generic_name[KVIO_SYSFS_NAME_MAX];
  int n =
      snprintf(link, sizeof(link), "%s/sys/dev/char/%u:%u", root, major(generic), minor(generic));
  if (n < 0 || n >= (int)sizeof(link))
    return -ENAMETOOLONG;
  if (!realpath(link, dir))
    return -errno;
  read_name(generic_name, dir);
  unsigned int instance, head;
  if (sscanf(generic_name, "ng%un%u", &instance, &head) != 2)
    return -ENODEV;
  /* The driver gives both nodes the same two numbers, with and without native multipath. */
  snprintf(name, KVIO_SYSFS_NAME_MAX, "nvme%un%u", instance, head);
  n = snprintf(dir, sizeof(dir), "%s/sys/class/block/%s", root, name);
  if (n < 0 || n >= (int)sizeof(dir))
    return -ENAMETOOLONG;
  return kvio_sysfs_dev(rdev, dir);
}

/* An unlinked file cannot be found by its path; the driver still knows its numbers. */
static bool loop_from_driver(struct kvio_sysfs_loop *loop, const char *disk_name)
{
  char node[PATH_MAX];
  struct loop_info64 info;
  snprintf(node, sizeof(node), "/dev/%s", disk_name);
  int fd = open(node, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return false;
  int rc = ioctl(fd, LOOP_GET_STATUS64, &info);
  close(fd);
  if (rc)
    return false;
  /* lo_device is the kernel's "new" encoding: 12 bits of major, 8 + 12 bits of minor. */
  uint64_t code = info.lo_device;
  loop->dev = makedev((code & 0xfff00) >> 8, (code & 0xff) | ((code >> 12) & 0xfff00));
  loop->ino = info.lo_inode;
  loop->rdev = 0;
  return true;
}

int kvio_sysfs_loop_find(struct kvio_sysfs_loop *loop, const char *root, const char *disk_name)
{
  memset(loop, 0, sizeof(*loop));
  int rc = kvio_sysfs_text(loop->file, sizeof(loop->file), "%s/sys/block/%s/loop/backing_file",
                           root, disk_name);
  if (rc)
    return rc;
  kvio_sysfs_u64(&loop->offset_bytes, "%s/sys/block/%s/loop/offset", root, disk_name);
  kvio_sysfs_u64(&loop->limit_bytes, "%s/sys/block/%s/loop/sizelimit", root, disk_name);

  size_t len = strlen(loop->file), suffix = strlen(DELETED_SUFFIX);
  bool deleted = len > suffix && strcmp(loop->file + len - suffix, DELETED_SUFFIX) == 0;
  struct stat st;
  if (!deleted && stat(loop->file, &st) == 0) {
    loop->dev = st.st_dev;
    loop->ino = st.st_ino;
    loop->rdev = S_ISBLK(st.st_mode) ? st.st_rdev : 0;
    loop->resolved = true;
  } else if (root[0] == '\0') {
    loop->resolved = loop_from_driver(loop, disk_name);
  }
  return 0;
}

int kvio_sysfs_extent(struct kvio_extent *extent, struct kvio_sysfs_stack *stack, const char *root,
                      dev_t rdev)
{
  struct kvio_sysfs_stack unused;
  struct kvio_sysfs_block block;
  struct kvio_sysfs_loop loop;
  if (!stack)
    stack = &unused;
  stack->n = 0;
  int rc = kvio_sysfs_block_find(&block, root, rdev);
  if (rc)
    return rc;
  *extent = (struct kvio_extent){
      .dev = block.disk, .start_bytes = block.start_bytes, .length_bytes = block.size_bytes};
  stack->disks[stack->n++] = block.disk;
  while (stack->n < KVIO_SYSFS_STACK_MAX &&
         kvio_sysfs_loop_find(&loop, root, block.disk_name) == 0 && loop.resolved) {
    extent->start_bytes += loop.offset_bytes;
    if (loop.rdev == 0) {
      extent->dev = loop.dev;
      extent->ino = loop.ino;
      break;
    }
    rc = kvio_sysfs_block_find(&block, root, loop.rdev);
    if (rc)
      return rc;
    extent->dev = block.disk;
    extent->start_bytes += block.start_bytes;
    stack->disks[stack->n++] = block.disk;
  }
  return 0;
}

bool kvio_extent_overlap(const struct kvio_extent *a, const struct kvio_extent *b)
{
  return a->dev == b->dev && a->ino == b->ino &&
         a->start_bytes < b->start_bytes + b->length_bytes &&
         b->start_bytes < a->start_bytes + a->length_bytes;
}

static bool all_zero_id(const char *id)
{
  return strspn(id, "0- :") == strlen(id);
}

void kvio_sysfs_identity(char *out, size_t out_bytes, const struct kvio_sysfs_block *block)
{
  static const char *const attrs[] = {"nguid", "eui", "uuid"};
  for (size_t i = 0; i < sizeof(attrs) / sizeof(attrs[0]); i++) {
    if (kvio_sysfs_text(out, out_bytes, "%s/%s", block->disk_dir, attrs[i]) == 0 &&
        !all_zero_id(out))
      return;
  }
  out[0] = '\0';
}
