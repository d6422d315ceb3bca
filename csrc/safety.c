/* SPDX-License-Identifier: Apache-2.0
 *
 * safety: collects reasons not to write, from the cheapest source to the dearest: the mount table
 * and the swap table, sysfs (holders, partitions, loop devices, read-only), an O_EXCL claim, and
 * last the bytes themselves. All reasons are collected, not only the first, so that a person sees
 * at once everything that stands in the way.
 *
 * The mount table is that of this process's namespace and can miss mounts of another; every
 * mounted file system also holds its device with O_EXCL, which the claim then finds.
 */
#include "safety.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "signature.h"
#include "sysfs.h"

/* An alignment that any O_DIRECT descriptor takes: Linux has no logical block above 64 KiB. */
#define SCRATCH_ALIGN (UINT64_C(64) << 10)
#define MAX_HITS 16

/* A device (ino 0) or a file that the kernel uses: mounted, or swap. */
struct in_use {
  dev_t dev;
  ino_t ino;
  char *how; /* "mounted on /data (xfs)", "in use as swap" */
};

struct inspection {
  const char *root;
  struct kvio_verdict *verdict;
  size_t text_bytes;
  struct in_use *uses;
  uint32_t n_uses;
};

static void add_reason(struct inspection *ins, uint32_t bit, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static void add_reason(struct inspection *ins, uint32_t bit, const char *fmt, ...)
{
  char line[512];
  va_list args;
  va_start(args, fmt);
  vsnprintf(line, sizeof(line), fmt, args);
  va_end(args);
  ins->verdict->reasons |= bit;
  if (strstr(ins->verdict->text, line))
    return; /* the same fact reached by two ways */
  size_t room = sizeof(ins->verdict->text) - ins->text_bytes;
  int n = snprintf(ins->verdict->text + ins->text_bytes, room, "%s%s", ins->text_bytes ? "\n" : "",
                   line);
  if (n >= 0 && (size_t)n < room)
    ins->text_bytes += (size_t)n;
  else
    ins->verdict->text[ins->text_bytes] = '\0'; /* whole lines only; the bit is set anyway */
}

/* ---- what the kernel uses ----------------------------------------------------------------- */

static int add_use(struct inspection *ins, dev_t dev, ino_t ino, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static int add_use(struct inspection *ins, dev_t dev, ino_t ino, const char *fmt, ...)
{
  struct in_use *grown = realloc(ins->uses, (ins->n_uses + 1) * sizeof(*grown));
  if (!grown)
    return -ENOMEM;
  ins->uses = grown;
  struct in_use *use = &grown[ins->n_uses];
  use->dev = dev;
  use->ino = ino;
  va_list args;
  va_start(args, fmt);
  int n = vasprintf(&use->how, fmt, args);
  va_end(args);
  if (n < 0)
    return -ENOMEM;
  ins->n_uses++;
  return 0;
}

/* The kernel writes blanks, tabs, newlines and backslashes in these tables as \ooo. */
static void unescape(char *text)
{
  char *to = text;
  for (const char *from = text; *from;) {
    if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' && from[2] <= '7' &&
        from[3] >= '0' && from[3] <= '7') {
      *to++ = (char)((from[1] - '0') << 6 | (from[2] - '0') << 3 | (from[3] - '0'));
      from += 4;
    } else {
      *to++ = *from++;
    }
  }
  *to = '\0';
}

/* id parent major:minor root mountpoint options [tags...] - type source superoptions */
static int add_mount_line(struct inspection *ins, char *line)
{
  unsigned int major_no, minor_no;
  int at = 0;
  char *rest = strstr(line, " - "), *save = NULL, *where;
  if (sscanf(line, "%*d %*d %u:%u %n", &major_no, &minor_no, &at) != 2 || !rest || at == 0)
    return 0;
  *rest = '\0';
  char *type = strtok_r(rest + 3, " \n", &save);
  char *source = type ? strtok_r(NULL, " \n", &save) : NULL;
  where = strtok_r(line + at, " ", &save);           /* root of the mount within its file system */
  where = where ? strtok_r(NULL, " ", &save) : NULL; /* the mount point */
  if (!where || !type)
    return 0;
  unescape(where);
  if (major_no != 0)
    return add_use(ins, makedev(major_no, minor_no), 0, "mounted on %s (%s)", where, type);
  /* btrfs and a few others mount under a number of their own; their source names the device */
  struct stat st;
  if (!source || strncmp(source, "/dev/", 5) != 0)
    return 0;
  unescape(source);
  if (stat(source, &st) != 0 || !S_ISBLK(st.st_mode))
    return 0;
  return add_use(ins, st.st_rdev, 0, "mounted on %s (%s)", where, type);
}

static int add_swap_line(struct inspection *ins, char *line)
{
  char *save = NULL, *path = strtok_r(line, " \t\n", &save);
  struct stat st;
  if (!path || path[0] != '/')
    return 0; /* the heading */
  unescape(path);
  if (stat(path, &st) != 0)
    return 0;
  if (S_ISBLK(st.st_mode))
    return add_use(ins, st.st_rdev, 0, "in use as swap");
  return add_use(ins, st.st_dev, st.st_ino, "in use as swap");
}

static int each_line(struct inspection *ins, const char *name,
                     int (*add)(struct inspection *, char *))
{
  char path[PATH_MAX], *line = NULL;
  size_t room = 0;
  int rc = 0;
  snprintf(path, sizeof(path), "%s%s", ins->root, name);
  FILE *file = fopen(path, "re");
  if (!file)
    return -errno;
  while (rc == 0 && getline(&line, &room, file) > 0)
    rc = add(ins, line);
  if (rc == 0 && ferror(file))
    rc = -EIO;
  free(line);
  fclose(file);
  return rc;
}

static void load_uses(struct inspection *ins)
{
  int rc = each_line(ins, "/proc/self/mountinfo", add_mount_line);
  if (rc)
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot read the mount table: %s", strerror(-rc));
  rc = each_line(ins, "/proc/swaps", add_swap_line);
  if (rc && rc != -ENOENT) /* a kernel without swap has no such file */
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot read the swap table: %s", strerror(-rc));
}

static void free_uses(struct inspection *ins)
{
  for (uint32_t i = 0; i < ins->n_uses; i++)
    free(ins->uses[i].how);
  free(ins->uses);
}

static void check_used(struct inspection *ins, dev_t dev, ino_t ino, uint32_t bit, const char *what)
{
  for (uint32_t i = 0; i < ins->n_uses; i++)
    if (ins->uses[i].dev == dev && ins->uses[i].ino == ino)
      add_reason(ins, bit, "%s is %s", what, ins->uses[i].how);
}

/* ---- sysfs -------------------------------------------------------------------------------- */

/* "dm-0 (vg-data)", "md127 (raid1)", or the bare name */
static void describe_holder(char *out, size_t out_bytes, const char *root, const char *holder)
{
  char detail[128];
  if (kvio_sysfs_text(detail, sizeof(detail), "%s/sys/block/%s/dm/name", root, holder) == 0 ||
      kvio_sysfs_text(detail, sizeof(detail), "%s/sys/block/%s/md/level", root, holder) == 0)
    snprintf(out, out_bytes, "%s (%s)", holder, detail);
  else
    snprintf(out, out_bytes, "%s", holder);
}

static void check_holders(struct inspection *ins, const char *dir, const char *what)
{
  char path[PATH_MAX + 16], holder[256 + 160];
  snprintf(path, sizeof(path), "%s/holders", dir);
  DIR *holders = opendir(path);
  if (!holders) {
    if (errno != ENOENT)
      add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot see what holds %s: %s", what,
                 strerror(errno));
    return;
  }
  for (struct dirent *entry = readdir(holders); entry; entry = readdir(holders)) {
    if (entry->d_name[0] == '.')
      continue;
    describe_holder(holder, sizeof(holder), ins->root, entry->d_name);
    add_reason(ins, KVIO_UNSAFE_HELD, "%s is held by %s", what, holder);
  }
  closedir(holders);
}

static void check_partitions(struct inspection *ins, const struct kvio_sysfs_block *disk)
{
  char dir[PATH_MAX + 300], list[160] = "";
  size_t list_bytes = 0;
  dev_t rdev;
  struct dirent **entries = NULL;
  int n_entries = scandir(disk->dir, &entries, NULL, versionsort);
  if (n_entries < 0)
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot list the partitions of %s: %s", disk->name,
               strerror(errno));
  for (int i = 0; i < n_entries; i++) {
    const char *name = entries[i]->d_name;
    snprintf(dir, sizeof(dir), "%s/%s", disk->dir, name);
    if (name[0] == '.' || !kvio_sysfs_exists("%s/partition", dir))
      continue;
    int n = snprintf(list + list_bytes, sizeof(list) - list_bytes, " %s", name);
    if (n > 0 && (size_t)n < sizeof(list) - list_bytes)
      list_bytes += (size_t)n;
    if (kvio_sysfs_dev(&rdev, dir) == 0)
      check_used(ins, rdev, 0, KVIO_UNSAFE_PARTITION_MOUNTED, name);
    check_holders(ins, dir, name);
  }
  for (int i = 0; i < n_entries; i++)
    free(entries[i]);
  free(entries);
  list[list_bytes] = '\0';
  if (list_bytes)
    add_reason(ins, KVIO_UNSAFE_PARTITIONED, "%s has partitions:%s", disk->name, list);
}

static bool is_multipath_leg(const char *name)
{
  unsigned int subsystem, controller, head;
  return sscanf(name, "nvme%uc%un%u", &subsystem, &controller, &head) == 3;
}

static void check_disk(struct inspection *ins, const struct kvio_sysfs_block *block)
{
  uint64_t flag = 0;
  if (kvio_sysfs_u64(&flag, "%s/ro", block->dir) == 0 && flag)
    add_reason(ins, KVIO_UNSAFE_READ_ONLY, "%s is read-only", block->name);
  flag = 0;
  kvio_sysfs_u64(&flag, "%s/hidden", block->disk_dir);
  if (flag || is_multipath_leg(block->disk_name))
    add_reason(ins, KVIO_UNSAFE_HIDDEN_PATH,
               "%s is one path of a multipath device: use its head instead", block->disk_name);
  check_holders(ins, block->dir, block->name);
  if (!block->partition) {
    check_partitions(ins, block);
    return;
  }
  check_used(ins, block->disk, 0, KVIO_UNSAFE_MOUNTED, block->disk_name);
  check_holders(ins, block->disk_dir, block->disk_name);
}

/* ---- loop devices ------------------------------------------------------------------------- */

static bool in_stack(const struct kvio_sysfs_stack *stack, dev_t disk)
{
  for (uint32_t i = 0; stack && i < stack->n; i++)
    if (stack->disks[i] == disk)
      return true;
  return false;
}

/* One loop device that shows bytes of ours: say so, and who uses it. */
static void report_loop(struct inspection *ins, const struct kvio_sysfs_block *loop,
                        const char *what)
{
  char via[KVIO_SYSFS_NAME_MAX + 64];
  add_reason(ins, KVIO_UNSAFE_BACKING_FILE, "%s is also behind the loop device %s", what,
             loop->name);
  snprintf(via, sizeof(via), "the loop device %s over it", loop->name);
  check_used(ins, loop->rdev, 0, KVIO_UNSAFE_MOUNTED, via);
  check_holders(ins, loop->dir, via);

  char dir[PATH_MAX + 300];
  dev_t rdev;
  DIR *entries = opendir(loop->dir);
  for (struct dirent *e = entries ? readdir(entries) : NULL; e; e = readdir(entries)) {
    snprintf(dir, sizeof(dir), "%s/%s", loop->dir, e->d_name);
    if (kvio_sysfs_exists("%s/partition", dir) && kvio_sysfs_dev(&rdev, dir) == 0)
      check_used(ins, rdev, 0, KVIO_UNSAFE_PARTITION_MOUNTED, e->d_name);
  }
  if (entries)
    closedir(entries);
}

/* Every bound loop device that overlaps the extent and is not one we look through ourselves. */
static void check_loops(struct inspection *ins, const struct kvio_extent *extent,
                        const struct kvio_sysfs_stack *stack, const char *what)
{
  char dir[PATH_MAX];
  struct kvio_sysfs_block block;
  struct kvio_extent other;
  dev_t rdev;
  snprintf(dir, sizeof(dir), "%s/sys/block", ins->root);
  DIR *disks = opendir(dir);
  if (!disks) {
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot list %s: %s", dir, strerror(errno));
    return;
  }
  for (struct dirent *entry = readdir(disks); entry; entry = readdir(disks)) {
    if (strncmp(entry->d_name, "loop", 4) != 0 ||
        !kvio_sysfs_exists("%s/sys/block/%s/loop/backing_file", ins->root, entry->d_name))
      continue;
    snprintf(dir, sizeof(dir), "%.2048s/sys/block/%s", ins->root, entry->d_name);
    if (kvio_sysfs_dev(&rdev, dir) || in_stack(stack, rdev) ||
        kvio_sysfs_block_find(&block, ins->root, rdev) ||
        kvio_sysfs_extent(&other, NULL, ins->root, rdev))
      continue;
    if (kvio_extent_overlap(extent, &other))
      report_loop(ins, &block, what);
  }
  closedir(disks);
}

/* What lies under a loop device: the disks, or the file, that it shows. */
static void check_below(struct inspection *ins, const struct kvio_extent *extent,
                        const struct kvio_sysfs_stack *stack)
{
  char what[KVIO_SYSFS_NAME_MAX + 16];
  struct kvio_sysfs_block block;
  for (uint32_t i = 1; i < stack->n; i++) {
    if (kvio_sysfs_block_find(&block, ins->root, stack->disks[i]))
      continue;
    snprintf(what, sizeof(what), "%s below it", block.name);
    check_used(ins, block.rdev, 0, KVIO_UNSAFE_MOUNTED, what);
    check_holders(ins, block.dir, what);
  }
  if (extent->ino)
    check_used(ins, extent->dev, extent->ino, KVIO_UNSAFE_MOUNTED | KVIO_UNSAFE_BACKING_FILE,
               "the file behind it");
}

static void check_block(struct inspection *ins, dev_t rdev)
{
  struct kvio_sysfs_block block;
  struct kvio_extent extent;
  struct kvio_sysfs_stack stack;
  int rc = kvio_sysfs_block_find(&block, ins->root, rdev);
  if (rc) {
    check_used(ins, rdev, 0, KVIO_UNSAFE_MOUNTED, "it");
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "sysfs does not describe device %u:%u (%s)",
               major(rdev), minor(rdev), strerror(-rc));
    return;
  }
  check_used(ins, rdev, 0, KVIO_UNSAFE_MOUNTED, block.name);
  check_disk(ins, &block);
  rc = kvio_sysfs_extent(&extent, &stack, ins->root, rdev);
  if (rc) {
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot see what is behind %s: %s", block.name,
               strerror(-rc));
    return;
  }
  check_below(ins, &extent, &stack);
  check_loops(ins, &extent, &stack, extent.ino ? "its file" : block.name);
}

/* ---- contents ----------------------------------------------------------------------------- */

/* Reads up to want bytes; less only at the end of the device. Returns the count or -errno. */
static int64_t read_window(int fd, uint8_t *to, uint64_t offset, uint64_t want)
{
  uint64_t done = 0;
  while (done < want) {
    ssize_t n = pread(fd, to + done, want - done, (off_t)(offset + done));
    if (n < 0 && errno == EINTR)
      continue;
    if (n < 0)
      return -errno;
    done += (uint64_t)n;
    if (n == 0 || done % 512 != 0)
      break; /* the end: O_DIRECT could not go on from here anyway */
  }
  return (int64_t)done;
}

static void scan_bytes(struct inspection *ins, int fd, uint64_t size_bytes, uint8_t *scratch)
{
  uint64_t room = KVIO_SIGNATURE_WINDOW + SCRATCH_ALIGN;
  uint64_t head = kvio_min_u64(size_bytes, KVIO_SIGNATURE_WINDOW);
  uint64_t tail_start = kvio_align_down(size_bytes - head, SCRATCH_ALIGN);
  int64_t got_head = read_window(fd, scratch, 0, KVIO_SIGNATURE_WINDOW);
  int64_t got_tail = read_window(fd, scratch + room, tail_start, room);
  if (got_head < (int64_t)head || got_tail < (int64_t)(size_bytes - tail_start)) {
    int rc = got_head < 0 ? (int)got_head : got_tail < 0 ? (int)got_tail : -EIO;
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot read its first and last MiB: %s",
               strerror(-rc));
    return;
  }
  struct kvio_signature_view view = {.head = scratch,
                                     .head_bytes = head,
                                     .tail = scratch + room,
                                     .tail_bytes = size_bytes - tail_start,
                                     .size_bytes = size_bytes};
  struct kvio_signature_hit hits[MAX_HITS];
  uint32_t n = kvio_signature_scan(&view, hits, MAX_HITS);
  for (uint32_t i = 0; i < n; i++)
    add_reason(ins, hits[i].table ? KVIO_UNSAFE_PARTITIONED : KVIO_UNSAFE_SIGNATURE,
               "%s signature at %llu", hits[i].name, (unsigned long long)hits[i].offset);
}

static void check_contents(struct inspection *ins, int fd)
{
  struct stat st;
  uint64_t size_bytes = 0;
  void *scratch = NULL;
  if (fstat(fd, &st) != 0 || (S_ISBLK(st.st_mode) && ioctl(fd, BLKGETSIZE64, &size_bytes) != 0)) {
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot read its size: %s", strerror(errno));
    return;
  }
  if (S_ISREG(st.st_mode))
    size_bytes = (uint64_t)st.st_size;
  else if (size_bytes == 0)
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "it has no size (nothing is behind it)");
  if (size_bytes == 0)
    return;
  int rc = posix_memalign(&scratch, SCRATCH_ALIGN, 2 * (KVIO_SIGNATURE_WINDOW + SCRATCH_ALIGN));
  if (rc) {
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "no memory to look at its contents");
    return;
  }
  scan_bytes(ins, fd, size_bytes, scratch);
  free(scratch);
}

/* ---- the whole ---------------------------------------------------------------------------- */

static void check_open(struct inspection *ins, const char *path, bool block)
{
  uint32_t known = KVIO_UNSAFE_MOUNTED | KVIO_UNSAFE_PARTITION_MOUNTED | KVIO_UNSAFE_HELD;
  bool claim = block && !(ins->verdict->reasons & known);
  if (faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) != 0)
    add_reason(ins, KVIO_UNSAFE_READ_ONLY, "%s",
               errno == EROFS ? "it is on a read-only file system"
                              : "this user may not write to it");
  int fd = open(path, O_RDONLY | O_CLOEXEC | (claim ? O_EXCL : 0));
  if (fd < 0 && errno == EBUSY && claim) {
    add_reason(ins, KVIO_UNSAFE_HELD, "another process or the kernel holds it exclusively");
    fd = open(path, O_RDONLY | O_CLOEXEC);
  }
  if (fd < 0) {
    add_reason(ins, KVIO_UNSAFE_UNREADABLE, "cannot open it to look: %s", strerror(errno));
    return;
  }
  check_contents(ins, fd);
  close(fd);
}

/* The character device of a namespace is judged by its block device. */
static int find_sibling(const char *path, const char *root, dev_t generic, char sibling[PATH_MAX],
                        dev_t *rdev)
{
  char name[KVIO_SYSFS_NAME_MAX];
  int rc = kvio_sysfs_generic_sibling(rdev, name, root, generic);
  const char *slash = strrchr(path, '/');
  int dir_bytes = slash ? (int)(slash - path) : 0;
  if (rc)
    return rc;
  snprintf(sibling, PATH_MAX, "%.*s%s%.60s", dir_bytes, path, slash ? "/" : "", name);
  return 0;
}

static int inspect(struct inspection *ins, const char *path, int fd)
{
  char sibling[PATH_MAX];
  struct stat st;
  if (fd >= 0 ? fstat(fd, &st) : stat(path, &st))
    return -errno;
  if (S_ISDIR(st.st_mode))
    return -EISDIR;
  if (S_ISCHR(st.st_mode) && st.st_rdev == makedev(1, 5))
    return 0; /* /dev/zero takes everything and keeps nothing */
  if (S_ISCHR(st.st_mode)) {
    dev_t rdev;
    int rc = find_sibling(path, ins->root, st.st_rdev, sibling, &rdev);
    if (rc)
      return rc == -ENOENT ? -ENODEV : rc;
    if (stat(sibling, &st) != 0)
      return -errno;
    if (!S_ISBLK(st.st_mode) || st.st_rdev != rdev)
      return -ENODEV;
    path = sibling;
    fd = -1;
  }
  if (!S_ISBLK(st.st_mode) && !S_ISREG(st.st_mode))
    return -EINVAL;

  load_uses(ins);
  if (S_ISBLK(st.st_mode)) {
    check_block(ins, st.st_rdev);
  } else {
    struct kvio_extent extent = {
        .dev = st.st_dev, .ino = st.st_ino, .length_bytes = (uint64_t)st.st_size};
    check_used(ins, st.st_dev, st.st_ino, KVIO_UNSAFE_MOUNTED | KVIO_UNSAFE_BACKING_FILE, "it");
    check_loops(ins, &extent, NULL, "it");
  }
  if (fd >= 0)
    check_contents(ins, fd);
  else
    check_open(ins, path, S_ISBLK(st.st_mode));
  return 0;
}

int kvio_safety_inspect_fd(int fd, const char *path, const char *root, struct kvio_verdict *verdict)
{
  struct inspection ins = {.root = root ? root : "", .verdict = verdict};
  verdict->reasons = 0;
  verdict->text[0] = '\0';
  int rc = inspect(&ins, path, fd);
  free_uses(&ins);
  return rc;
}

int kvio_safety_inspect(const char *path, const char *root, struct kvio_verdict *verdict)
{
  return kvio_safety_inspect_fd(-1, path, root, verdict);
}
