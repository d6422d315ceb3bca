"""A kernel that says no: io_uring that is refused after the open, a thread limit, a descriptor
limit, an ordinary user's limit for locked memory. Nothing hangs, no result is wrong, errors are
clear.

Method: children under seccomp filters, resource limits, and the identity of nobody. (A refusal at
the open itself is in test_matrix.py.)
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvio
from tests.engine.lib import MIB, open_folder, run_child, stall_ends, wait_until
from tests.support.faultdev import FaultDevice

REFUSE = """
import ctypes
from tests.support import seccomp
def refuse_everywhere(code, syscalls=(426,)):
    '''In all threads of this process, from now on (seccomp(2) with TSYNC).'''
    program = seccomp._assemble(code, syscalls)
    memory = ctypes.create_string_buffer(program, len(program))
    filters = seccomp._Program(len(program) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    number = {"x86_64": 317, "aarch64": 277}[os.uname().machine]
    assert libc.syscall(number, 1, 1, ctypes.byref(filters)) == 0, ctypes.get_errno()
def outcome(vol, action):
    errors = []
    got = sorted(set(action(errors).tolist()))
    return got, sorted({error.errno for error in errors})
def busy_seconds(seconds):
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before
"""


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
def test_entering_the_ring_is_refused_after_the_open(
    code: int, make_files: Callable[..., list[str]]
) -> None:
    """Goal: batches fail with that errno, or are served another way; later ones too; no thread
    spins; close() is quick."""
    paths = make_files(2, 2 * MIB)
    out = run_child(
        REFUSE
        + """
code, paths = int(sys.argv[1]), sys.argv[2:]
vol = kvio.Volume.open(paths, mode="rw", direct="prefer", engine="io_uring", stripe_unit=65536)
data = aligned(vol.size)
data[:] = np.frombuffer(np.random.default_rng(1).bytes(vol.size), np.uint8)
assert vol.pwrite(data, 0) == vol.size
assert vol.submit_read([0, 65536], aligned(131072)).wait(20).tolist() == [65536] * 2
refuse_everywhere(code)
for turn in range(3):
    into = aligned(131072)
    for action in (lambda e: vol.read_batch([0, 65536], into, errors=e),
                   lambda e: vol.read_batch([0, 65536], into, errors=e, deadline=10),
                   lambda e: (b := vol.submit_read([0, 65536], into), b.wait(10),
                              e.extend(b.errors()))[1]):
        into[:] = 0
        got, errors = outcome(vol, action)
        if got == [65536]:
            assert not errors
            same(into, data[:131072], "served another way")
        else:
            assert got == [-code] and errors == [code], (got, errors)
print(json.dumps({"busy": busy_seconds(1.0), "poisoned": vol.stats().poisoned_rings}))
start = time.monotonic()
vol.close(timeout=10)
assert time.monotonic() - start < 5
assert quarantine(vol) == (0, 0)
""",
        code,
        *paths,
        timeout=100,
    )
    report = json.loads(out)
    assert report["busy"] < 0.5, f"{report['busy']} s of processor time in an idle second"
    assert report["poisoned"] < 1000


@pytest.mark.root
@pytest.mark.parametrize("where", ["worker", "caller"])
def test_ring_that_dies_with_reads_in_flight(where: str, disk: FaultDevice) -> None:
    """Goal: a ring that cannot be entered any more expires what is in flight, keeps its buffers,
    refuses what follows, and close() says that it kept something. Nothing hangs."""
    stall = disk.stall("read", offset=8 * MIB, length=4 * MIB)
    code = """
path, where = sys.argv[1:]
vol = kvio.Volume.open([path], mode="rw", engine="io_uring")
buffers = [bytearray(65536) for _ in range(4)]
places = [(8 + i) << 20 for i in range(4)]
print("ready", flush=True)
if where == "worker":
    batch = vol.submit_read(places, buffers)
else:
    got = []
    read = lambda: got.append(vol.read_batch(places, buffers))
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
wait_until(lambda: vol.stats().members[0].in_flight == 4, "four reads in flight")
refuse_everywhere(errno.EPERM)
if where == "worker":
    # the worker sits in the kernel; this wakes it, and it cannot go in again
    second = vol.submit_read([0, 4096], [bytearray(4096), bytearray(4096)])
    assert second.wait(20).tolist() == [-errno.EPERM] * 2, second.results()
    assert batch.wait(20).tolist() == [-errno.EPERM] * 4, batch.results()
    assert vol.stats().quarantined_buffers == 4
    assert not any(map(resizable, buffers)), "the kernel may still write there"
    third = vol.submit_read([0], [bytearray(4096)])
    assert third.wait(20).tolist() in ([-errno.EPERM], [4096])
    assert busy_seconds(1.0) < 0.5, "a thread spins"
start = time.monotonic()
try:
    vol.close(timeout=1)
    print("closed")
except kvio.DeadlineExceeded as error:
    print("kept" if "kept" in str(error) else str(error))
assert time.monotonic() - start < 6
assert not any(map(resizable, buffers))
print("done", flush=True)
os._exit(0)
"""

    with stall_ends(stall, 15):
        out = run_child(REFUSE + code, disk.device, where, timeout=60)
    assert out.splitlines() == ["ready", "kept", "done"]


@pytest.mark.root
def test_more_threads_than_the_limit_allows(
    require_root: None, make_files: Callable[..., list[str]]
) -> None:
    """Goal: without a single thread to start, submitted batches are refused by name and blocking
    ones work. Method: RLIMIT_NPROC of nobody."""
    (path,) = make_files(1, MIB)
    with open_folder() as folder:
        member = folder / "member"
        member.write_bytes(Path(path).read_bytes())
        member.chmod(0o666)
        out = run_child(
            """
vol = kvio.Volume.open(sys.argv[1:], mode="rw", direct="prefer", engine="threads")
become_nobody()
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
into = aligned(1 << 20)
try:
    print(vol.submit_read([0, 4096], [aligned(4096)] * 2).wait(20).tolist())
except OSError as error:
    print("refused", error.errno == errno.EAGAIN, "ulimit -u" in str(error))
assert vol.read_batch([0, 4096], [aligned(4096)] * 2).tolist() == [4096, 4096]
assert vol.pread(into, 0) == 1 << 20
vol.flush()
vol.close()
print("closed")
""",
            member,
        )
    lines = out.splitlines()
    assert lines[0] in ("refused True True", "[4096, 4096]")
    assert lines[1] == "closed"


def test_no_descriptor_left(make_files: Callable[..., list[str]]) -> None:
    """Goal: EMFILE is a clear refusal or a fallback at every step; afterwards all works again."""
    paths = make_files(2, MIB)
    run_child(
        """
paths = sys.argv[1:]
vol = kvio.Volume.open(paths, mode="rw", direct="prefer", stripe_unit=65536)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
held = [os.dup(0) for _ in range(4)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
for fd in held:
    os.close(fd)
free = 4  # descriptors that can still be had
hoard = [os.dup(0) for _ in range(free)]
refused = 0
for action in (lambda: vol.submit_read([0, 65536], aligned(131072)).wait(10),
               lambda: kvio.Volume.open(paths, direct="prefer")):
    try:
        action()
    except OSError as error:
        assert error.errno == errno.EMFILE, error
        refused += 1
assert refused == 2
# a thread that has no ring yet: served without one
got = []
read = lambda: got.append(vol.read_batch([0, 65536], aligned(131072)).tolist())
thread = threading.Thread(target=read)
thread.start(); thread.join()
assert got == [[65536, 65536]], got
assert vol.read_batch([0, 65536], aligned(131072)).tolist() == [65536, 65536]
for fd in hoard:
    os.close(fd)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert vol.submit_read([0, 65536], aligned(131072)).wait(10).tolist() == [65536, 65536]
vol.close()
""",
        *paths,
    )


@pytest.mark.root
@pytest.mark.parametrize("limit", [64 << 10, 8 << 20], ids=["64 KiB", "8 MiB"])
def test_ordinary_user_with_little_locked_memory(limit: int, require_root: None) -> None:
    """Goal: registration is refused by RLIMIT_MEMLOCK, that is told with limit and remedy, and all
    I/O works unregistered. A registration that fits is used."""
    with open_folder() as folder:
        paths = kvio.Volume.create([folder / "a", folder / "b"], size_bytes=4 * MIB)
        for path in paths:
            Path(path).chmod(0o666)
        out = run_child(
            """
limit, paths = int(sys.argv[1]), sys.argv[2:]
rng = np.random.default_rng(2)  # numpy.random is imported here: nobody may not look where it lies
become_nobody(limit)
assert os.getuid() == 65534
vol = kvio.Volume.open(paths, mode="rw", direct="prefer", stripe_unit=65536)
assert vol.engine in ("io_uring", "threads")
large = aligned(32 << 20)
granted = vol.register(large)
told = vol.capabilities["register_refused"]
data = np.frombuffer(rng.bytes(vol.size), np.uint8)
large[: vol.size] = data
assert vol.pwrite(large[: vol.size], 0) == vol.size
large[: vol.size] = 0
assert vol.read_batch([0, 1 << 20], large[: 2 << 20]).tolist() == [1 << 20] * 2
same(large[: 2 << 20], data[: 2 << 20], "blocking")
assert vol.submit_read([0, 1 << 20], large[: 2 << 20]).wait(20).tolist() == [1 << 20] * 2
got = []
thread = threading.Thread(target=lambda: got.append(vol.read_batch([0], [large[: 4 << 20]])[0]))
thread.start(); thread.join()
assert got == [4 << 20]
same(large[: 4 << 20], data[: 4 << 20], "another thread")
stats = vol.stats()
print(json.dumps({"granted": granted, "told": told, "fixed": stats.fixed_ops,
                  "engine": vol.engine}))
vol.close()
""",
            limit,
            *paths,
        )
    report = json.loads(out)
    if report["engine"] == "threads":
        pytest.skip("an ordinary user gets no io_uring here (kernel.io_uring_disabled)")
    assert report["granted"] is False
    assert report["fixed"] == 0
    for word in ("ENOMEM", "RLIMIT_MEMLOCK", str(limit), "ulimit -l"):
        assert word in report["told"]


@pytest.mark.root
def test_pool_of_an_ordinary_user_beyond_the_limit(require_root: None) -> None:
    with open_folder() as folder:
        (path,) = kvio.Volume.create([folder / "a"], size_bytes=4 * MIB)
        Path(path).chmod(0o666)
        out = run_child(
            """
become_nobody(1 << 20)
with kvio.BufferPool(16 << 20) as pool, kvio.Volume.open(sys.argv[1:], direct="prefer") as vol:
    with pool.alloc(4 << 20) as memory:
        assert vol.read_batch([0, 1 << 20], memory.numpy()[: 2 << 20]).tolist() == [1 << 20] * 2
        assert vol.submit_read([0], [memory]).wait(20).tolist() == [4 << 20]
    print("RLIMIT_MEMLOCK" in vol.capabilities["register_refused"], vol.engine)
""",
            path,
        )
    assert out.split()[1] == "threads" or out.split() == ["True", "io_uring"]


def test_registration_that_fits_is_used(make_files: Callable[..., list[str]]) -> None:
    with kvio.Volume.open(make_files(1, 2 * MIB), direct="prefer", engine="io_uring") as vol:
        memory = np.zeros(2 * MIB, np.uint8)
        assert vol.register(memory) is True
        before = vol.stats()
        assert vol.read_batch([0, MIB], memory).tolist() == [MIB, MIB]
        if vol.stats().delta(before).bounced == 0:
            assert vol.stats().delta(before).fixed_ops >= 2
        vol.unregister(memory)
        assert vol.capabilities["regions"] == 0
        wait_until(lambda: vol.capabilities["register_refused"] == "", "nothing was refused")
