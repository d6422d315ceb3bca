/* SPDX-License-Identifier: Apache-2.0
 *
 * device: opens one member and finds out what it is. The order of an open:
 *   look (stat) -> open, with the claim -> look again (same thing?) -> safety -> geometry -> probes
 * A failure at any step closes what was opened; nothing is ever written here.
 */
#include "device.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "nvme.h"
#include "probe.h"
#include "safety.h"
#include "sysfs.h"

#define FILE_BLOCK_DEFAULT 4096
#define FILE_BLOCK_MAX 65536
#define ZERO_BLOCK 512
#define NVME_MEM_ALIGN 4096 /* a command's segments begin and end at pages of the controller */
#define EXTENT_OF_UNKNOWN ((ino_t)-1)

/* ---- names and messages ------------------------------------------------------------------- */

struct file_system {
  uint32_t magic;
  const char *name;
  bool punches; /* FALLOC_FL_PUNCH_HOLE */
};

static const struct file_system *find_file_system(int fd, const char *path)
{
  static const struct file_system known[] = {
      {EXT4_SUPER_MAGIC, "ext4", true},    {0x58465342, "xfs", true},
      {BTRFS_SUPER_MAGIC, "btrfs", true},  {F2FS_SUPER_MAGIC, "f2fs", true},
      {TMPFS_MAGIC, "tmpfs", true},        {0xca451a4e, "bcachefs", true},
      {0x7461636f, "ocfs2", true},         {0x01161970, "gfs2", true},
      {0x2fc12fc1, "zfs", true},           {OVERLAYFS_SUPER_MAGIC, "overlayfs", true},
      {NFS_SUPER_MAGIC, "nfs", true},      {0xff534d42, "cifs", true},
      {0xfe534d42, "smb2", true},          {0x65735546, "fuse", true},
      {0x00c36400, "ceph", true},          {0x01021997, "9p", false},
      {RAMFS_MAGIC, "ramfs", false},       {HUGETLBFS_MAGIC, "hugetlbfs", true},
      {SQUASHFS_MAGIC, "squashfs", false}, {0xe0f5e1e2, "erofs", false},
      {MSDOS_SUPER_MAGIC, "vfat", false},  {0x2011bab0, "exfat", false},
      {0x0bd00bd0, "lustre", false},       {0x47504653, "gpfs", true},
  };
  static const struct file_system unknown = {0, "this file system", false};
  struct statfs fs;
  if ((fd >= 0 ? fstatfs(fd, &fs) : statfs(path, &fs)) != 0)
    return &unknown;
  for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
    if (known[i].magic == (uint32_t)fs.f_type)
      return &known[i];
  return &unknown;
}

static int refuse_direct(const struct kvio_device *dev, struct kvio_error *err)
{
  return kvio_error_set(err, -EINVAL,
                        "%s: %s refuses O_DIRECT here; put the file on ext4, xfs or btrfs, or "
                        "open it with direct=\"prefer\" or direct=False",
                        dev->path, find_file_system(dev->fd, dev->path)->name);
}

static const char *remedy(int code)
{
  switch (code) {
  case ENOENT:
  case ENOTDIR:
    return "check the path; make files with kvio.Volume.create()";
  case EACCES:
  case EPERM:
    return "run as root, or as a user (group \"disk\" for devices) who may open it";
  case ENXIO:
  case ENODEV:
  case ENOMEDIUM:
    return "the node is there but no device is behind it; reconnect the device";
  case EROFS:
    return "remount the file system read-write, or open with mode=\"r\"";
  case EMFILE:
  case ENFILE:
    return "raise the limit of open files (ulimit -n)";
  case ETXTBSY:
    return "the file is a running program or swap";
  default:
    return "see the kernel log (dmesg)";
  }
}

static int refuse_open(const struct kvio_device *dev, int code, struct kvio_error *err)
{
  return kvio_error_set(err, -code, "%s: cannot open it for %s: %s; %s", dev->path,
                        dev->write ? "writing" : "reading", strerror(code), remedy(code));
}

/* One line for a message: reasons are joined with "; ". What does not fit is cut. */
static void join_reasons(const char *text, char *out, size_t out_bytes)
{
  size_t n = 0;
  for (; *text && n + 3 < out_bytes; text++) {
    if (*text == '\n' && text[1] == '\0')
      break;
    out[n++] = *text == '\n' ? ';' : *text;
    if (*text == '\n')
      out[n++] = ' ';
  }
  out[n] = '\0';
}

/* ---- safety ------------------------------------------------------------------------------- */

static int refuse_write(const struct kvio_device *dev, struct kvio_verdict *verdict,
                        struct kvio_error *err)
{
  bool never = verdict->reasons & KVIO_UNSAFE_NEVER;
  bool only_ro = verdict->reasons == KVIO_UNSAFE_READ_ONLY;
  char reasons[512];
  join_reasons(verdict->text, reasons, sizeof(reasons));
  return kvio_error_set(
      err, only_ro ? -EROFS : -EBUSY, "%s: refused for writing: %.400s; %s", dev->path, reasons,
      never ? "release it first (nothing overrides this)"
            : "allow_destroy=True (--allow-destroy) overrides this and destroys what is there");
}

/* After EBUSY: nobody wrote anything; say who has it. */
static int explain_busy(const struct kvio_device *dev, const char *path, struct kvio_error *err)
{
  struct kvio_verdict verdict;
  int rc = kvio_safety_inspect(path, "", &verdict);
  if (rc || !(verdict.reasons & KVIO_UNSAFE_NEVER))
    return kvio_error_set(err, -EBUSY,
                          "%s: refused for writing: another process or the kernel holds it "
                          "exclusively; close that first (nothing overrides this)",
                          dev->path);
  return refuse_write(dev, &verdict, err);
}

/* fd is the claim: the block device itself, or for a character device its sibling. */
static int check_safety(struct kvio_device *dev, const struct kvio_device_opts *opts, int fd,
                        const char *path, struct kvio_error *err)
{
  struct kvio_verdict verdict;
  int rc = kvio_safety_inspect_fd(fd, path, "", &verdict);
  if (rc)
    return kvio_error_set(err, rc, "%s: cannot be inspected before writing: %s", dev->path,
                          strerror(-rc));
  if (verdict.reasons == 0)
    return 0;
  if ((verdict.reasons & KVIO_UNSAFE_NEVER) || !opts->allow_destroy)
    return refuse_write(dev, &verdict, err);
  dev->destroys = strdup(verdict.text);
  return dev->destroys ? 0 : kvio_error_set(err, -ENOMEM, "%s: out of memory", dev->path);
}

/* ---- opening ------------------------------------------------------------------------------ */

static int refuse_kind(const struct kvio_device *dev, int code, const char *what,
                       struct kvio_error *err)
{
  return kvio_error_set(err, code,
                        "%s: is %s; a member is a block device, a regular file, an NVMe generic "
                        "device (/dev/ng0n1) or /dev/zero",
                        dev->path, what);
}

static int find_kind(struct kvio_device *dev, const struct stat *st, struct kvio_error *err)
{
  char name[KVIO_SYSFS_NAME_MAX] = "", what[160];
  unsigned int instance;
  dev_t sibling;
  if (S_ISBLK(st->st_mode))
    dev->kind = KVIO_DEVICE_BLOCK;
  else if (S_ISREG(st->st_mode))
    dev->kind = KVIO_DEVICE_FILE;
  else if (S_ISCHR(st->st_mode) && st->st_rdev == makedev(1, 5))
    dev->kind = KVIO_DEVICE_ZERO;
  else if (S_ISDIR(st->st_mode))
    return refuse_kind(dev, -EISDIR, "a directory", err);
  else if (S_ISFIFO(st->st_mode))
    return refuse_kind(dev, -EINVAL, "a FIFO", err);
  else if (S_ISSOCK(st->st_mode))
    return refuse_kind(dev, -EINVAL, "a socket", err);
  else if (kvio_sysfs_generic_sibling(&sibling, name, "", st->st_rdev) == 0 || name[0])
    dev->kind = KVIO_DEVICE_NVME_CHAR;
  else if (sscanf(strrchr(dev->path, '/') ? strrchr(dev->path, '/') + 1 : dev->path, "nvme%u",
                  &instance) == 1) {
    snprintf(what, sizeof(what), "an NVMe controller (its namespaces are /dev/nvme%un1, ...)",
             instance);
    return refuse_kind(dev, -EINVAL, what, err);
  } else
    return refuse_kind(dev, -EINVAL, "a character device", err);
  return 0;
}

static int open_flags(const struct kvio_device *dev, const struct kvio_device_opts *opts)
{
  int flags = O_CLOEXEC | (opts->write ? O_RDWR : O_RDONLY);
  if ((dev->kind == KVIO_DEVICE_BLOCK || dev->kind == KVIO_DEVICE_FILE) &&
      opts->direct != KVIO_DIRECT_OFF)
    flags |= O_DIRECT;
  return flags;
}

static int open_fd(struct kvio_device *dev, const struct kvio_device_opts *opts,
                   const struct stat *st, struct kvio_error *err)
{
  int flags = open_flags(dev, opts);
  uint64_t read_only = 0;
  struct stat now;
  if (dev->kind == KVIO_DEVICE_BLOCK && opts->write) {
    dev->hold_fd = open(dev->path, O_RDONLY | O_EXCL | O_CLOEXEC); /* no O_CREAT: a claim */
    if (dev->hold_fd < 0 && errno == EBUSY)
      return explain_busy(dev, dev->path, err);
    if (dev->hold_fd < 0)
      return refuse_open(dev, errno, err);
  }
  dev->fd = open(dev->path, flags);
  if (dev->fd < 0 && errno == EINVAL && (flags & O_DIRECT)) {
    if (opts->direct == KVIO_DIRECT_REQUIRE)
      return refuse_direct(dev, err);
    flags &= ~O_DIRECT;
    dev->fd = open(dev->path, flags);
  }
  if (dev->fd < 0) {
    int code = errno;
    struct kvio_sysfs_block block;
    if (dev->write && S_ISBLK(st->st_mode) && kvio_sysfs_block_find(&block, "", st->st_rdev) == 0 &&
        kvio_sysfs_u64(&read_only, "%s/ro", block.dir) == 0 && read_only)
      return kvio_error_set(err, -EROFS,
                            "%s: the device is read-only; make it writable (blockdev --setrw) or "
                            "open with mode=\"r\"",
                            dev->path);
    return refuse_open(dev, code, err);
  }
  if (fstat(dev->fd, &now) != 0)
    return refuse_open(dev, errno, err);
  bool replaced = (now.st_mode & S_IFMT) != (st->st_mode & S_IFMT) || now.st_rdev != st->st_rdev ||
                  now.st_dev != st->st_dev || now.st_ino != st->st_ino;
  if (dev->hold_fd >= 0) /* the claim must be of the same device, not only of the same name */
    replaced = replaced || fstat(dev->hold_fd, &now) != 0 || now.st_rdev != st->st_rdev;
  if (replaced)
    return kvio_error_set(err, -ESTALE, "%s: it was replaced while it was opened; try again",
                          dev->path);
  return 0;
}

/* ---- geometry ----------------------------------------------------------------------------- */

static void set_buffered(struct kvio_device *dev)
{
  int flags = fcntl(dev->fd, F_GETFL);
  if (flags >= 0 && (flags & O_DIRECT))
    fcntl(dev->fd, F_SETFL, flags & ~O_DIRECT);
  dev->direct = false;
  dev->mem_align = dev->offset_align = dev->write_align = 1;
}

/* Alignment of a block device or a file, and whether O_DIRECT is really there (D2, D3). */
static int find_alignment(struct kvio_device *dev, const struct kvio_device_opts *opts,
                          uint32_t logical_block, struct kvio_error *err)
{
  struct kvio_alignment align;
  int flags = fcntl(dev->fd, F_GETFL);
  dev->direct = flags >= 0 && (flags & O_DIRECT);
  int rc = dev->direct ? kvio_probe_alignment(&align, dev->fd, logical_block) : 0;
  if (rc == -EINVAL && opts->direct == KVIO_DIRECT_REQUIRE)
    return refuse_direct(dev, err);
  if (rc && rc != -EINVAL)
    return kvio_error_set(err, rc, "%s: out of memory", dev->path);
  if (rc || !dev->direct) {
    set_buffered(dev);
    return 0;
  }
  dev->mem_align = align.memory;
  dev->offset_align = align.read;
  dev->write_align = (uint32_t)kvio_max_u64(
      align.write, kvio_is_pow2(dev->physical_block) ? dev->physical_block : 0);
  return 0;
}

/* What sysfs says of the queue under the member; block NULL when it says nothing. */
static void read_queue(struct kvio_device *dev, const struct kvio_sysfs_block *block)
{
  char cache[32];
  uint64_t discard_bytes = 0;
  if (!block)
    return;
  if (kvio_sysfs_text(cache, sizeof(cache), "%s/queue/write_cache", block->disk_dir) == 0)
    dev->volatile_cache = strcmp(cache, "write back") == 0;
  if (kvio_sysfs_u64(&discard_bytes, "%s/queue/discard_max_bytes", block->disk_dir) == 0)
    dev->can_discard = discard_bytes != 0;
  kvio_sysfs_identity(dev->identity, sizeof(dev->identity), block);
}

static int refuse_zoned(const struct kvio_device *dev, const struct kvio_sysfs_block *block,
                        struct kvio_error *err)
{
  char zoned[32];
  if (!dev->write || !block ||
      kvio_sysfs_text(zoned, sizeof(zoned), "%s/queue/zoned", block->disk_dir) ||
      strcmp(zoned, "host-managed") != 0)
    return 0;
  return kvio_error_set(err, -EOPNOTSUPP,
                        "%s: is a zoned device, which takes no writes at random offsets; use a "
                        "conventional namespace",
                        dev->path);
}

static int read_block_size(struct kvio_device *dev, struct kvio_error *err)
{
  int logical = 0;
  unsigned int physical = 0;
  if (ioctl(dev->fd, BLKGETSIZE64, &dev->size_bytes) != 0 ||
      ioctl(dev->fd, BLKSSZGET, &logical) != 0 || ioctl(dev->fd, BLKPBSZGET, &physical) != 0)
    return kvio_error_set(err, -errno, "%s: cannot read its size and block size: %s", dev->path,
                          strerror(errno));
  dev->logical_block = (uint32_t)logical;
  dev->physical_block = physical;
  if (dev->size_bytes == 0)
    return kvio_error_set(err, -ENXIO,
                          "%s: has no size: a loop or zram device that is not set up, or a "
                          "namespace that lost its controller",
                          dev->path);
  return 0;
}

static int find_block_geometry(struct kvio_device *dev, const struct kvio_device_opts *opts,
                               struct kvio_error *err)
{
  struct kvio_sysfs_block found, *block = &found;
  if (kvio_sysfs_block_find(block, "", dev->rdev))
    block = NULL; /* a container without sysfs: go on with what ioctls say */
  int rc = read_block_size(dev, err);
  if (rc == 0)
    rc = refuse_zoned(dev, block, err);
  if (rc == 0 && dev->write)
    rc = check_safety(dev, opts, dev->fd, dev->path, err);
  if (rc == 0)
    rc = find_alignment(dev, opts, dev->logical_block, err);
  if (rc)
    return rc;
  read_queue(dev, block);
  if (kvio_sysfs_extent(&dev->extent, NULL, "", dev->rdev))
    dev->extent = (struct kvio_extent){.dev = dev->rdev};
  dev->extent.length_bytes = dev->size_bytes;

  struct kvio_io_limits limits;
  dev->nowait_read = kvio_probe_nowait(dev->fd, dev->offset_align);
  kvio_probe_limits(&limits, block, dev->nowait_read);
  dev->max_io_bytes = limits.huge_pages;
  dev->max_io_small_pages = limits.small_pages;
  return 0;
}

static int find_file_geometry(struct kvio_device *dev, const struct kvio_device_opts *opts,
                              const struct stat *st, struct kvio_error *err)
{
  struct kvio_sysfs_block found, *block = &found;
  struct kvio_io_limits limits;
  dev->size_bytes = (uint64_t)st->st_size;
  if (dev->size_bytes == 0)
    return kvio_error_set(err, -EINVAL,
                          "%s: is empty; a member has its full size from the start: make it with "
                          "kvio.Volume.create()",
                          dev->path);
  int rc = dev->write ? check_safety(dev, opts, dev->fd, dev->path, err) : 0;
  dev->physical_block = FILE_BLOCK_DEFAULT;
  if (kvio_is_pow2((uint64_t)st->st_blksize) && st->st_blksize >= KVIO_SECTOR_BYTES &&
      st->st_blksize <= FILE_BLOCK_MAX)
    dev->physical_block = (uint32_t)st->st_blksize;
  if (rc == 0)
    rc = find_alignment(dev, opts, 0, err);
  if (rc)
    return rc;
  dev->logical_block = dev->direct ? dev->offset_align : KVIO_SECTOR_BYTES;
  dev->sparse = (uint64_t)st->st_blocks * KVIO_SECTOR_BYTES < dev->size_bytes;
  dev->volatile_cache = true;
  dev->can_discard = find_file_system(dev->fd, dev->path)->punches;
  dev->extent =
      (struct kvio_extent){.dev = dev->dev, .ino = dev->ino, .length_bytes = dev->size_bytes};
  if (kvio_sysfs_block_find(block, "", dev->dev))
    block = NULL; /* btrfs, tmpfs, network: no queue to read */
  dev->nowait_read = kvio_probe_nowait(dev->fd, dev->offset_align);
  kvio_probe_limits(&limits, block, dev->nowait_read);
  dev->max_io_bytes = limits.huge_pages;
  dev->max_io_small_pages = limits.small_pages;
  return 0;
}

static int find_zero_geometry(struct kvio_device *dev)
{
  dev->size_bytes = KVIO_ZERO_SIZE;
  dev->logical_block = dev->physical_block = ZERO_BLOCK;
  dev->mem_align = dev->offset_align = dev->write_align = 1;
  dev->max_io_bytes = dev->max_io_small_pages = KVIO_IO_MAX_BYTES;
  dev->nowait_read = kvio_probe_nowait(dev->fd, ZERO_BLOCK);
  return 0;
}

/* The block device of the same namespace: limits, claim and safety check go through it. */
static int open_sibling(struct kvio_device *dev, const struct kvio_device_opts *opts,
                        struct kvio_sysfs_block *block, struct kvio_error *err)
{
  char name[KVIO_SYSFS_NAME_MAX], path[PATH_MAX];
  struct stat st;
  dev_t rdev;
  int rc = kvio_sysfs_generic_sibling(&rdev, name, "", dev->rdev);
  if (rc == 0)
    rc = kvio_sysfs_block_find(block, "", rdev);
  if (!opts->write)
    return rc == 0 ? 0 : -ENOENT; /* a reader can do without */
  const char *slash = strrchr(dev->path, '/');
  snprintf(path, sizeof(path), "%.*s%.60s", slash ? (int)(slash - dev->path) + 1 : 0, dev->path,
           name);
  if (rc || stat(path, &st) != 0 || !S_ISBLK(st.st_mode) || st.st_rdev != rdev)
    return kvio_error_set(err, -EBUSY,
                          "%s: refused for writing: its block device (%s) is not there, so it "
                          "cannot be claimed or inspected; open it with mode=\"r\"",
                          dev->path, path);
  dev->hold_fd = open(path, O_RDONLY | O_EXCL | O_CLOEXEC);
  if (dev->hold_fd < 0 && errno == EBUSY)
    return explain_busy(dev, path, err);
  if (dev->hold_fd < 0)
    return kvio_error_set(err, -errno, "%s: cannot claim its block device %s: %s", dev->path, path,
                          strerror(errno));
  return check_safety(dev, opts, dev->hold_fd, path, err);
}

static int find_nvme_geometry(struct kvio_device *dev, const struct kvio_device_opts *opts,
                              struct kvio_error *err)
{
  struct kvio_sysfs_block block;
  struct kvio_nvme_namespace ns;
  uint64_t max_kb = 0, max_segments = 0, physical = 0;
  int sibling = open_sibling(dev, opts, &block, err);
  if (sibling && (opts->write || sibling != -ENOENT))
    return sibling;
  int64_t nsid = kvio_nvme_get_nsid(dev->fd);
  int rc = nsid < 0 ? (int)nsid : kvio_nvme_identify(dev->fd, (uint32_t)nsid, &ns);
  if (rc)
    return kvio_error_set(err, rc, "%s: cannot identify the namespace: %s; %s", dev->path,
                          strerror(-rc),
                          rc == -ENOLINK ? "no path to it is live: see `kvio info`"
                                         : "passthrough needs root, or permission on the node");
  if (ns.metadata_bytes)
    return kvio_error_set(err, -EOPNOTSUPP,
                          "%s: its blocks carry %u bytes of metadata each; use the block device, "
                          "or format the namespace without metadata",
                          dev->path, ns.metadata_bytes);
  dev->nsid = (uint32_t)nsid;
  dev->lba_shift = ns.lba_shift;
  dev->size_bytes = ns.size_bytes;
  dev->logical_block = dev->physical_block = UINT32_C(1) << ns.lba_shift;
  dev->extent = (struct kvio_extent){.dev = dev->rdev, .ino = EXTENT_OF_UNKNOWN};
  if (sibling == 0) {
    rc = refuse_zoned(dev, &block, err);
    if (rc)
      return rc;
    read_queue(dev, &block);
    kvio_sysfs_u64(&max_kb, "%s/queue/max_hw_sectors_kb", block.disk_dir);
    kvio_sysfs_u64(&max_segments, "%s/queue/max_segments", block.disk_dir);
    kvio_sysfs_u64(&physical, "%s/queue/physical_block_size", block.disk_dir);
    dev->extent = (struct kvio_extent){.dev = block.disk};
  }
  dev->extent.length_bytes = dev->size_bytes;
  if (kvio_is_pow2(physical) && physical > dev->physical_block && physical <= FILE_BLOCK_MAX)
    dev->physical_block = (uint32_t)physical;
  dev->can_discard = false;
  dev->direct = dev->nowait_read = true; /* commands are issued inline and never cached */
  dev->mem_align = NVME_MEM_ALIGN;
  dev->offset_align = dev->logical_block;
  dev->write_align = dev->physical_block;
  dev->max_io_bytes = kvio_nvme_max_bytes(max_kb, max_segments, ns.lba_shift);
  dev->max_io_small_pages = dev->max_io_bytes; /* max_segments is already in it */
  return 0;
}

static int find_geometry(struct kvio_device *dev, const struct kvio_device_opts *opts,
                         const struct stat *st, struct kvio_error *err)
{
  switch (dev->kind) {
  case KVIO_DEVICE_BLOCK:
    return find_block_geometry(dev, opts, err);
  case KVIO_DEVICE_FILE:
    return find_file_geometry(dev, opts, st, err);
  case KVIO_DEVICE_ZERO:
    return find_zero_geometry(dev);
  case KVIO_DEVICE_NVME_CHAR:
    return find_nvme_geometry(dev, opts, err);
  }
  return -EINVAL;
}

/* ---- the interface ------------------------------------------------------------------------ */

int kvio_device_open(struct kvio_device *dev, const struct kvio_device_opts *opts,
                     struct kvio_error *err)
{
  struct stat st;
  memset(dev, 0, sizeof(*dev));
  dev->fd = dev->hold_fd = -1;
  dev->write = opts->write;
  dev->path = strdup(opts->path ? opts->path : "");
  if (!dev->path)
    return kvio_error_set(err, -ENOMEM, "%s: out of memory", opts->path);
  int rc = 0;
  if (dev->path[0] == '\0')
    rc = kvio_error_set(err, -EINVAL, "a member has an empty path");
  else if (stat(dev->path, &st) != 0)
    rc = refuse_open(dev, errno, err);
  if (rc == 0)
    rc = find_kind(dev, &st, err);
  if (rc == 0)
    rc = open_fd(dev, opts, &st, err);
  if (rc == 0 && dev->kind == KVIO_DEVICE_FILE) {
    dev->dev = st.st_dev;
    dev->ino = st.st_ino;
  } else if (rc == 0) {
    dev->rdev = st.st_rdev;
  }
  if (rc == 0)
    rc = find_geometry(dev, opts, &st, err);
  if (rc)
    kvio_device_close(dev);
  return rc;
}

void kvio_device_close(struct kvio_device *dev)
{
  if (dev->fd >= 0)
    close(dev->fd);
  if (dev->hold_fd >= 0)
    close(dev->hold_fd); /* last: the claim outlives the descriptor that writes */
  free(dev->path);
  free(dev->destroys);
  memset(dev, 0, sizeof(*dev));
  dev->fd = dev->hold_fd = -1;
}

bool kvio_device_same(const struct kvio_device *a, const struct kvio_device *b)
{
  if (a->kind == KVIO_DEVICE_ZERO || b->kind == KVIO_DEVICE_ZERO)
    return false; /* it stores nothing, so there is nothing to share */
  if (kvio_extent_overlap(&a->extent, &b->extent))
    return true;
  if (a->identity[0] == '\0' || strcmp(a->identity, b->identity) != 0)
    return false;
  /* one namespace under two names (two paths): compare the ranges on it */
  struct kvio_extent other = b->extent;
  other.dev = a->extent.dev;
  other.ino = a->extent.ino;
  return kvio_extent_overlap(&a->extent, &other);
}

int kvio_device_flush(const struct kvio_device *dev)
{
  if (dev->kind == KVIO_DEVICE_ZERO)
    return 0;
  if (dev->kind == KVIO_DEVICE_NVME_CHAR)
    return kvio_nvme_flush(dev->fd, dev->nsid);
  return fdatasync(dev->fd) == 0 ? 0 : -errno;
}

int kvio_device_discard(const struct kvio_device *dev, uint64_t offset, uint64_t length)
{
  if (!dev->write)
    return -EBADF;
  if (offset > dev->size_bytes || length > dev->size_bytes - offset)
    return -EINVAL;
  if (length == 0)
    return 0;
  if (dev->kind == KVIO_DEVICE_BLOCK) {
    uint64_t range[2] = {offset, length};
    return ioctl(dev->fd, BLKDISCARD, range) == 0 ? 0 : -errno;
  }
  if (dev->kind == KVIO_DEVICE_FILE) {
    int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    return fallocate(dev->fd, mode, (off_t)offset, (off_t)length) == 0 ? 0 : -errno;
  }
  return -EOPNOTSUPP;
}
