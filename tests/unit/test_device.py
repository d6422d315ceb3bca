"""Opening one member: what it is found to be, and what is refused.

Method: real files, loop devices and file systems; what the member claims about itself is checked
against what the kernel does with its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cdevice import (
    OFF,
    PREFER,
    REQUIRE,
    RefusedError,
    core,
    loop_device,
    mounted,
    opened,
    run,
    tool,
)

MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.write_bytes(os.urandom(MIB) * 8)
    return path


def text(value: Any) -> str:
    return core().ffi.string(value).decode() if value else ""


def aligned(nbytes: int) -> mmap.mmap:
    """Memory in 4 KiB pages."""
    memory = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    memory[:] = b"\1" * nbytes
    return memory


def read_at(fd: int, nbytes: int, offset: int, memory: mmap.mmap, skew: int = 0) -> int:
    """Bytes read, or -errno."""
    try:
        return os.preadv(fd, [memoryview(memory)[skew : skew + nbytes]], offset)
    except OSError as error:
        return -(error.errno or errno.EIO)


# ---- geometry ----------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("block", [512, 4096])
def test_block_device_alignment_is_what_the_kernel_asks_for(block: int, image: Path) -> None:
    options = ["--direct-io=on", "--sector-size", str(block)]
    with loop_device(image, *options) as device, opened(device) as dev:
        assert dev.size_bytes == 8 * MIB
        assert (dev.logical_block, dev.offset_align, dev.write_align) == (block, block, block)
        assert dev.direct
        assert fcntl.fcntl(dev.fd, fcntl.F_GETFL) & os.O_DIRECT
        memory = aligned(1 << 16)
        assert read_at(dev.fd, block, block, memory) == block
        assert read_at(dev.fd, block, block, memory, skew=dev.mem_align) == block
        assert read_at(dev.fd, block, block // 2, memory) == -errno.EINVAL
        assert read_at(dev.fd, block // 2, 0, memory) == -errno.EINVAL


def test_file_alignment_is_what_the_kernel_asks_for(image: Path) -> None:
    try:
        with opened(image) as dev:
            memory = aligned(1 << 17)
            assert dev.size_bytes == 8 * MIB
            assert dev.volatile_cache
            assert dev.offset_align % dev.logical_block == 0
            assert dev.write_align >= dev.physical_block >= dev.offset_align
            step = dev.offset_align
            assert read_at(dev.fd, step, step, memory) == step
            assert read_at(dev.fd, step, step, memory, skew=dev.mem_align) == step
    except RefusedError as refused:
        pytest.skip(f"the temporary directory has no O_DIRECT: {refused}")


def test_without_o_direct_everything_is_aligned(image: Path) -> None:
    with opened(image, direct=OFF) as dev:
        assert not dev.direct
        assert (dev.mem_align, dev.offset_align, dev.write_align) == (1, 1, 1)
        assert not fcntl.fcntl(dev.fd, fcntl.F_GETFL) & os.O_DIRECT
        assert read_at(dev.fd, 3, 5, aligned(4096), skew=1) == 3


@pytest.mark.root
def test_file_system_that_refuses_o_direct_is_named_or_served_without(tmp_path: Path) -> None:
    with mounted("ramfs", tmp_path, "-t", "ramfs"):
        file = tmp_path / "file"
        file.write_bytes(bytes(65536))
        with pytest.raises(RefusedError) as refused:
            with opened(file, direct=REQUIRE):
                pass
        assert refused.value.errno == errno.EINVAL
        for word in (str(file), "ramfs", "O_DIRECT", 'direct="prefer"', "ext4"):
            assert word in refused.value.message
        with opened(file, direct=PREFER, write=True) as dev:
            assert not dev.direct
            assert dev.offset_align == 1


@pytest.mark.root
def test_o_direct_that_would_be_served_from_the_cache_is_not_believed(tmp_path: Path) -> None:
    """ext4 with journalled data accepts O_DIRECT at open and then goes through the page cache."""
    image, where = tmp_path / "image", tmp_path / "mnt"
    where.mkdir()
    with image.open("wb") as out:
        out.truncate(64 * MIB)
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    with loop_device(image) as device, mounted(device, where, "-o", "data=journal"):
        file = where / "file"
        file.write_bytes(bytes(MIB))
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)  # the premise: open says yes
        os.close(fd)
        with pytest.raises(RefusedError, match="ext4 refuses O_DIRECT"):
            with opened(file, direct=REQUIRE):
                pass
        with opened(file, direct=PREFER) as dev:
            assert not dev.direct
            assert not fcntl.fcntl(dev.fd, fcntl.F_GETFL) & os.O_DIRECT


@pytest.mark.root
def test_read_that_must_not_block_is_accepted_up_to_max_io(image: Path) -> None:
    """Beyond it the block layer answers EAGAIN (it does not split), and io_uring goes to io-wq."""
    with contextlib.ExitStack() as stack:
        file = Path("/dev/shm") / f"kvio-device-{os.getpid()}"
        stack.callback(file.unlink, missing_ok=True)
        file.write_bytes(bytes(8 * MIB))
        device = stack.enter_context(loop_device(file, "--direct-io=on"))
        dev = stack.enter_context(opened(device))
        if not dev.nowait_read:
            pytest.skip("this kernel's loop devices take no RWF_NOWAIT")
        assert 65536 <= dev.max_io_small_pages <= dev.max_io_bytes <= MIB
        memory = aligned(dev.max_io_small_pages)
        for offset in range(0, 4 * MIB, MIB):
            assert os.preadv(dev.fd, [memory], offset, os.RWF_NOWAIT) == len(memory)


@pytest.mark.parametrize("nowait", [True, False])
@pytest.mark.parametrize(
    ("sysfs", "expected"),
    [
        (("2147483647", "254"), (MIB, 512 << 10)),  # virtio: a limit that says nothing
        (("124", "128"), (65536, 65536)),  # zram: not a power of two
        (("1280", "128"), (MIB, 512 << 10)),  # loop
        (("128", "33"), (128 << 10, 128 << 10)),  # an NVMe drive
        (("4", "1"), (65536, 65536)),  # nothing below 64 KiB
        (("0", "0"), (MIB, MIB)),
        (("", ""), (MIB, MIB)),
        (("18446744073709551615", "18446744073709551615"), (MIB, MIB)),
        (("nonsense", "x"), (MIB, MIB)),
    ],
)
def test_queue_limits_are_clamped_to_a_power_of_two(
    sysfs: tuple[str, str], expected: tuple[int, int], nowait: bool, tmp_path: Path
) -> None:
    module = core()
    (tmp_path / "queue").mkdir()
    for name, value in zip(("max_sectors_kb", "max_segments"), sysfs, strict=True):
        (tmp_path / "queue" / name).write_text(f"{value}\n")
    block = module.ffi.new("struct kvio_sysfs_block *", {"disk_dir": os.fsencode(tmp_path)})
    limits = module.ffi.new("struct kvio_io_limits *")
    module.lib.kvio_probe_limits(limits, block, nowait)
    if not nowait:  # the kernel hands every read to a thread anyway: nothing is won by small ones
        expected = (MIB, MIB)
    assert (limits.huge_pages, limits.small_pages) == expected


def test_dev_zero_is_a_member_that_takes_everything() -> None:
    with opened("/dev/zero", write=True) as dev:
        assert dev.size_bytes == 1 << 40
        assert dev.offset_align == dev.mem_align == 1
        assert core().lib.kvio_device_flush(dev) == 0


def test_holes_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as out:
        out.truncate(8 * MIB)
    with opened(file, direct=PREFER, write=True) as dev:
        assert dev.sparse
    file.write_bytes(b"x" * 8 * MIB)
    os.sync()
    with opened(file, direct=PREFER, write=True) as dev:
        assert not dev.sparse


# ---- refusals ----------------------------------------------------------------------------------


def refusal(path: str | Path, **options: Any) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        with opened(path, **options):
            pass
    assert "\n" not in refused.value.message, "a message is one line"
    return refused.value


@pytest.mark.parametrize("write", [False, True])
def test_what_is_no_member_is_refused_with_its_kind(write: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    for path, code, word in [
        (tmp_path, errno.EISDIR, "directory"),
        (tmp_path / "fifo", errno.EINVAL, "FIFO"),
        (tmp_path / "empty", errno.EINVAL, "empty"),
        (tmp_path / "loop", errno.ELOOP, "symbolic links"),
        (tmp_path / "dangling", errno.ENOENT, "Volume.create"),
        (tmp_path / "absent", errno.ENOENT, "Volume.create"),
        (tmp_path / "empty/below", errno.ENOTDIR, "path"),
        ("/dev/null", errno.EINVAL, "character device"),
        ("", errno.EINVAL, "empty path"),
    ]:
        refused = refusal(path, write=write)
        assert refused.errno == code, path
        assert word in refused.message
        assert str(path) in refused.message


@pytest.mark.root
def test_loop_device_without_a_file_is_refused(image: Path) -> None:
    with loop_device(image) as device:
        pass
    refused = refusal(device)
    assert refused.errno == errno.ENXIO
    assert "no size" in refused.message


@pytest.mark.root
def test_read_only_device_is_refused_for_writing_only(image: Path) -> None:
    with loop_device(image, "--read-only") as device:
        assert refusal(device, write=True, allow_destroy=True).errno == errno.EROFS
        with opened(device) as dev:
            assert not dev.write


@pytest.mark.root
def test_writer_excludes_writers_and_not_readers(image: Path) -> None:
    with loop_device(image) as device:
        with opened(device, write=True), opened(device):
            refused = refusal(device, write=True, allow_destroy=True)
            assert refused.errno == errno.EBUSY
            assert "exclusively" in refused.message
            with pytest.raises(OSError, match="busy"):
                os.open(device, os.O_RDONLY | os.O_EXCL)
        with opened(device, write=True):
            pass


@pytest.mark.root
@pytest.mark.parametrize("on", ["device", "file"])
def test_signed_member_is_untouched_by_a_refusal_and_named_when_overridden(
    on: str, image: Path
) -> None:
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    before = image.read_bytes()
    with loop_device(image) if on == "device" else contextlib.nullcontext(image) as target:
        refused = refusal(target, write=True, direct=PREFER)
        assert refused.errno == errno.EBUSY
        for word in (str(target), "ext2/3/4 signature at 1080", "allow_destroy=True"):
            assert word in refused.message
        with opened(target, direct=PREFER) as dev:
            assert text(dev.destroys) == ""
        with opened(target, write=True, direct=PREFER, allow_destroy=True) as dev:
            assert text(dev.destroys) == "ext2/3/4 signature at 1080"
    assert image.read_bytes() == before


@pytest.mark.root
def test_mounted_device_is_refused_whatever_is_asked(image: Path, tmp_path: Path) -> None:
    run(tool("mke2fs"), "-q", "-F", "-t", "ext4", image)
    where = tmp_path / "mnt"
    where.mkdir()
    with loop_device(image) as device, mounted(device, where):
        for target in (device, image):
            refused = refusal(target, write=True, direct=PREFER, allow_destroy=True)
            assert refused.errno == errno.EBUSY
            assert f"mounted on {where}" in refused.message
            assert "nothing overrides this" in refused.message


@pytest.mark.root
def test_permission_is_explained() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become nobody")
    file = Path("/dev/shm") / f"kvio-device-{os.getpid()}"
    core()
    read_end, write_end = os.pipe()
    try:
        file.write_bytes(bytes(4096))
        file.chmod(0o400)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                with opened(file):
                    pass
            except RefusedError as refused:
                os.write(write_end, f"{refused.errno} {refused.message}".encode())
            finally:
                os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        with os.fdopen(read_end) as pipe:
            answer = pipe.read()
        assert answer.startswith(f"{errno.EACCES} ")
        assert "run as root" in answer
    finally:
        file.unlink(missing_ok=True)


def test_opening_and_refusing_leaks_no_descriptor(image: Path, tmp_path: Path) -> None:
    core()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(500):
        with opened(image, direct=PREFER, write=True):
            pass
        refusal(tmp_path)
        refusal(tmp_path / "absent")
    assert len(os.listdir("/proc/self/fd")) == before
