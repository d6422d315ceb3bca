"""The C files under `kvio.devices`, compiled for the tests: device, safety, signature, sysfs, nvme.

Tests of these files need what the package does not export: a root of their own for sysfs, the
signature scanner on plain memory, NVMe commands as bytes. cffi's API mode has the compiler check
every field named here, so a changed header fails the build and not the meaning of a test. Undefined
behaviour aborts; under an ASan run of the suite this module is built with ASan too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cffi
import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = ("base", "device", "safety", "signature", "sysfs", "probe", "nvme")

DEFINITIONS = """
struct kvio_error { int code; char message[640]; ...; };
struct kvio_extent { uint64_t start_bytes; uint64_t length_bytes; ...; };
struct kvio_device_opts { const char *path; bool write; int direct; bool allow_destroy; ...; };
struct kvio_device {
  char *path; int fd; int hold_fd; uint64_t size_bytes;
  uint32_t logical_block, physical_block, mem_align, offset_align, write_align;
  uint32_t max_io_bytes, max_io_small_pages;
  bool write, direct, nowait_read, volatile_cache, can_discard, sparse;
  uint32_t nsid, lba_shift; char identity[...]; struct kvio_extent extent; char *destroys; ...;
};
int t_open(struct kvio_device *dev, const char *path, bool write, int direct, bool allow_destroy,
           struct kvio_error *err);
void kvio_device_close(struct kvio_device *dev);
bool kvio_device_same(const struct kvio_device *a, const struct kvio_device *b);
int kvio_device_flush(const struct kvio_device *dev);
int kvio_device_discard(const struct kvio_device *dev, uint64_t offset, uint64_t length);
int t_kind(const struct kvio_device *dev);

struct kvio_verdict { uint32_t reasons; char text[2048]; };
int kvio_safety_inspect(const char *path, const char *root, struct kvio_verdict *verdict);
static const int KVIO_UNSAFE_MOUNTED, KVIO_UNSAFE_PARTITION_MOUNTED, KVIO_UNSAFE_HELD,
    KVIO_UNSAFE_PARTITIONED, KVIO_UNSAFE_SIGNATURE, KVIO_UNSAFE_HIDDEN_PATH, KVIO_UNSAFE_READ_ONLY,
    KVIO_UNSAFE_UNREADABLE, KVIO_UNSAFE_BACKING_FILE, KVIO_UNSAFE_NEVER;

struct kvio_sysfs_block { char disk_dir[...]; ...; };
struct kvio_io_limits { uint32_t huge_pages, small_pages; };
void kvio_probe_limits(struct kvio_io_limits *limits, const struct kvio_sysfs_block *block,
                       bool nowait);

struct kvio_signature_view {
  const uint8_t *head; uint64_t head_bytes; const uint8_t *tail; uint64_t tail_bytes;
  uint64_t size_bytes;
};
struct kvio_signature_hit { const char *name; uint64_t offset; bool table; };
uint32_t kvio_signature_scan(const struct kvio_signature_view *view,
                             struct kvio_signature_hit *hits, uint32_t max);

struct kvio_nvme_namespace {
  uint64_t size_bytes; uint32_t lba_shift, metadata_bytes; bool shared;
};
static const int t_nvme_cmd_bytes;
void t_nvme_rw(uint8_t *cmd, bool write, uint32_t nsid, uint32_t lba_shift, uint64_t offset,
               uint64_t length, uint64_t addr);
int64_t kvio_nvme_result(int32_t res, uint64_t length);
int kvio_nvme_status_errno(uint32_t status);
const char *kvio_nvme_status_text(uint32_t status);
uint32_t kvio_nvme_max_bytes(uint64_t max_hw_sectors_kb, uint64_t max_segments, uint32_t lba_shift);
int t_nvme_parse(struct kvio_nvme_namespace *ns, const uint8_t *id);
"""

SHIM = """
#include <string.h>
#include "device.h"
#include "nvme.h"
#include "probe.h"
#include "safety.h"
#include "signature.h"

static const int t_nvme_cmd_bytes = sizeof(struct kvio_nvme_cmd);

static int t_open(struct kvio_device *dev, const char *path, bool write, int direct,
                  bool allow_destroy, struct kvio_error *err)
{
  struct kvio_device_opts opts = {.path = path, .write = write, .direct = (enum kvio_direct)direct,
                                  .allow_destroy = allow_destroy};
  return kvio_device_open(dev, &opts, err);
}

static int t_kind(const struct kvio_device *dev)
{
  return (int)dev->kind;
}

static void t_nvme_rw(uint8_t *cmd, bool write, uint32_t nsid, uint32_t lba_shift, uint64_t offset,
                      uint64_t length, uint64_t addr)
{
  kvio_nvme_build_rw((struct kvio_nvme_cmd *)cmd, write, nsid, lba_shift, offset, length,
                     (const void *)(uintptr_t)addr);
}

static int t_nvme_parse(struct kvio_nvme_namespace *ns, const uint8_t *id)
{
  return kvio_nvme_parse_namespace(ns, id);
}
"""


@functools.cache
def core() -> Any:
    """Build and load the module once per test process; returns it (`.ffi`, `.lib`)."""
    preload = os.environ.get("LD_PRELOAD", "")
    sanitizers = "undefined,address" if "asan" in preload else "undefined"
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    builder = cffi.FFI()
    builder.cdef(DEFINITIONS)
    builder.set_source(
        "_kvio_cdevice",
        SHIM,
        sources=[str(CSRC / f"{name}.c") for name in SOURCES],
        include_dirs=[str(CSRC)],
        extra_compile_args=["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", *flags],
        extra_link_args=flags,
    )
    with tempfile.TemporaryDirectory(prefix="kvio-cdevice-") as scratch:
        path = builder.compile(tmpdir=scratch)
        spec = importlib.util.spec_from_file_location("_kvio_cdevice", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def inspect(path: str | Path, root: str | Path = "") -> tuple[int, str]:
    """`kvio_safety_inspect`: the reason bits and their text; OSError where it returns -errno."""
    module = core()
    verdict = module.ffi.new("struct kvio_verdict *")
    rc = module.lib.kvio_safety_inspect(os.fsencode(path), os.fsencode(root), verdict)
    if rc:
        raise OSError(-rc, os.strerror(-rc), str(path))
    return verdict.reasons, module.ffi.string(verdict.text).decode()


REQUIRE, PREFER, OFF = 0, 1, 2


class RefusedError(Exception):
    """`kvio_device_open` said no: `.errno` and `.message`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = -code
        self.message = message


@contextlib.contextmanager
def opened(
    path: str | Path, *, write: bool = False, direct: int = REQUIRE, allow_destroy: bool = False
) -> Iterator[Any]:
    """An open `struct kvio_device`, or RefusedError."""
    module = core()
    dev = module.ffi.new("struct kvio_device *")
    err = module.ffi.new("struct kvio_error *")
    rc = module.lib.t_open(dev, os.fsencode(path), write, direct, allow_destroy, err)
    if rc:
        assert dev.fd == -1, "a refused open leaves nothing open"
        assert err.code == rc
        raise RefusedError(rc, module.ffi.string(err.message).decode())
    try:
        yield dev
    finally:
        module.lib.kvio_device_close(dev)


def tool(name: str) -> str:
    """Absolute path of a program that the test needs; skips with the reason when it is absent."""
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def tool_environment() -> dict[str, str]:
    """Environment for foreign programs: a preloaded sanitizer judges our code, not theirs."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run(*argv: str | Path, **kwargs: Any) -> str:
    """Run a program; its standard output. Fails the test with its standard error."""
    done = subprocess.run(
        [str(a) for a in argv],
        capture_output=True,
        text=True,
        check=False,
        env=tool_environment(),
        **kwargs,
    )
    assert done.returncode == 0, f"{argv}: {done.stderr or done.stdout}"
    return done.stdout


@contextlib.contextmanager
def loop_device(file: str | Path, *options: str) -> Iterator[str]:
    """A loop device over a file, detached at the end; skips where loop devices cannot be made."""
    losetup = tool("losetup")
    if os.geteuid() != 0:
        pytest.skip("loop devices need root")
    done = subprocess.run(
        [losetup, "--find", "--show", *options, str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    name = done.stdout.strip()
    try:
        yield name
    finally:
        run(losetup, "--detach", name)


@contextlib.contextmanager
def mounted(device: str | Path, where: Path, *options: str) -> Iterator[Path]:
    """A mounted device; skips where this user may not mount."""
    done = subprocess.run(
        [tool("mount"), *options, str(device), str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield where
    finally:
        run(tool("umount"), where)
