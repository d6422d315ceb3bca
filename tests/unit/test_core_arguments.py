"""What Volume's calls refuse: wrong buffers, offsets, lists, options. Nothing is read or written.

Method: real files; every refusal must be a ValueError or TypeError that names the argument, and the
file must be unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from tests.engine.lib import MIB, aligned, run_child

FILL = b"\x5a"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    kvio.Volume.create([tmp_path / "member"], size_bytes=MIB)
    (tmp_path / "member").write_bytes(FILL * MIB)
    return tmp_path / "member"


@pytest.fixture
def vol(path: Path) -> Iterator[kvio.Volume]:
    with kvio.Volume.open([path], mode="rw", direct="prefer") as vol:
        yield vol
    assert path.read_bytes() == FILL * MIB, "a refused call has changed the file"


def read_only_array() -> np.ndarray[Any, Any]:
    array = aligned(4096)
    array.flags.writeable = False
    return array


UNWRITABLE = [
    (b"x" * 4096, "bytes"),
    (memoryview(b"x" * 4096), "a read-only view"),
    (read_only_array(), "a read-only array"),
    (memoryview(bytearray(4096)).toreadonly(), "toreadonly"),
]
NOT_CONTIGUOUS = [
    (np.zeros(8192, np.uint8)[::2], "every other byte"),
    (np.zeros((64, 128), np.uint8)[:, :64], "columns"),
    (np.zeros((64, 64), np.uint8).T, "a transposed array"),
    (np.zeros((64, 64), np.uint8, order="F"), "Fortran order"),
    (memoryview(bytearray(8192))[::-1], "a reversed view"),
]
NO_MEMORY = [
    (None, "None"),
    (5, "an int"),
    (4.0, "a float"),
    (object(), "an object"),
    ("text", "str"),
]


def ids(cases: list[tuple[Any, str]]) -> list[str]:
    return [name for _, name in cases]


@pytest.mark.parametrize("way", ["pread", "batch", "nested", "submit"])
@pytest.mark.parametrize(("buffer", "_name"), UNWRITABLE, ids=ids(UNWRITABLE))
def test_read_into_memory_that_cannot_be_written(
    buffer: Any, _name: str, way: str, vol: kvio.Volume
) -> None:
    with pytest.raises(ValueError, match="writable and contiguous"):
        call(vol, "read", way, buffer)


@pytest.mark.parametrize("way", ["pread", "batch", "nested", "submit"])
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize(("buffer", "_name"), NOT_CONTIGUOUS, ids=ids(NOT_CONTIGUOUS))
def test_memory_with_gaps(buffer: Any, _name: str, verb: str, way: str, vol: kvio.Volume) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        call(vol, verb, way, buffer)


@pytest.mark.parametrize("way", ["pread", "batch", "nested", "submit"])
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize(("buffer", "_name"), NO_MEMORY, ids=ids(NO_MEMORY))
def test_object_without_memory(
    buffer: Any, _name: str, verb: str, way: str, vol: kvio.Volume
) -> None:
    with pytest.raises(TypeError, match="buffer protocol"):
        call(vol, verb, way, buffer)


def call(vol: kvio.Volume, verb: str, way: str, buffer: Any) -> None:
    if way == "pread":
        (vol.pread if verb == "read" else vol.pwrite)(buffer, 0)
    elif way == "submit":
        getattr(vol, f"submit_{verb}")([0, 4096], [aligned(4096), buffer])
    else:
        item = [aligned(512), buffer] if way == "nested" else buffer
        getattr(vol, f"{verb}_batch")([0, 4096, 8192], [aligned(4096), item, aligned(4096)])


def test_error_names_the_buffer_that_is_wrong(vol: kvio.Volume) -> None:
    with pytest.raises(TypeError, match=r"buffers\[2\]: int"):
        vol.read_batch([0, 1, 2], [aligned(512), aligned(512), 7])
    with pytest.raises(ValueError, match=r"buffers\[1\]"):
        vol.read_batch([0, 1], [aligned(512), b"read-only"])


@pytest.mark.parametrize("verb", ["read_batch", "write_batch", "submit_read", "submit_write"])
@pytest.mark.parametrize(
    ("offsets", "buffers", "error", "words"),
    [
        ([0, 4096], [bytearray(4096)], ValueError, "2 offsets but 1 buffers"),
        ([0], [bytearray(512)] * 2, ValueError, "1 offsets but 2 buffers"),
        ([], [bytearray(512)], ValueError, "0 offsets but 1 buffers"),
        ([0], None, TypeError, "buffer protocol"),
        ([0], 4096, TypeError, "buffer protocol"),
        ([0, 1, 2], bytearray(4096), ValueError, "cannot be split into 3 equal parts"),
        (None, [bytearray(512)], TypeError, "offsets"),
        (0, [bytearray(512)], TypeError, "offsets"),
        (["0"], [bytearray(512)], TypeError, r"offsets\[0\]"),
        ([0.0], [bytearray(512)], TypeError, r"offsets\[0\]"),
        ([None], [bytearray(512)], TypeError, r"offsets\[0\]"),
        ([-1], [bytearray(512)], ValueError, "negative"),
        ([0, -4096], [bytearray(512)] * 2, ValueError, r"offsets\[1\].*negative"),
        ([2**63], [bytearray(512)], ValueError, r"offsets\[0\]"),
        ([2**64], [bytearray(512)], ValueError, r"offsets\[0\]"),
        ([2**63 - 1], [bytearray(512)], ValueError, "beyond 2\\^63"),
        (np.array([-1]), [bytearray(512)], ValueError, "negative"),
        (np.array([2**63], np.uint64), [bytearray(512)], ValueError, "2\\^63"),
        (np.array([0.0]), [bytearray(512)], TypeError, "64-bit integers"),
        (np.array([0], np.int32), [bytearray(512)], TypeError, "64-bit integers"),
        (np.zeros((1, 1), np.int64), [bytearray(512)], ValueError, "one dimension"),
    ],
)  # fmt: skip
def test_wrong_lists(
    verb: str, offsets: Any, buffers: Any, error: type[Exception], words: str, vol: kvio.Volume
) -> None:
    with pytest.raises(error, match=words):
        getattr(vol, verb)(offsets, buffers)


def test_offsets_that_lie_apart_in_memory_are_refused_or_read_right(vol: kvio.Volume) -> None:
    every_other = np.array([0, 99, 512, 99, 1024, 99])[::2]
    try:
        got = vol.read_batch(every_other, [aligned(512) for _ in range(3)])
    except (ValueError, BufferError) as refused:
        assert "contiguous" in str(refused)  # noqa: PT017 (either is right)
    else:
        assert got.tolist() == [512] * 3


def test_byte_swapped_offsets_are_not_taken_for_others(vol: kvio.Volume) -> None:
    with pytest.raises((TypeError, ValueError)):
        vol.read_batch(np.array([512], ">i8"), [aligned(512)])


@pytest.mark.parametrize(
    ("addresses", "lengths"),
    [
        (np.zeros(1, np.uint64), np.full(1, 512, np.uint64)),  # the null pointer
        (np.full(1, 4096, np.uint64), np.full(1, 2**63, np.uint64)),  # no such length
    ],
)
def test_addresses_that_are_no_memory(addresses: Any, lengths: Any, vol: kvio.Volume) -> None:
    with pytest.raises(ValueError, match="no memory"):
        vol.read_batch([0], (addresses, lengths))


def test_addresses_of_another_type_are_not_taken_for_addresses(vol: kvio.Volume) -> None:
    pair = (np.zeros(1, np.int64), np.full(1, 512, np.int64))
    with pytest.raises((TypeError, ValueError)):
        vol.read_batch([0], pair)


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), -0.0])
def test_deadline_that_is_no_time(deadline: float, vol: kvio.Volume) -> None:
    for action in (vol.flush, lambda **k: vol.pread(aligned(512), 0, **k),
                   lambda **k: vol.submit_read([0], [aligned(512)], **k)):  # fmt: skip
        with pytest.raises(ValueError, match="deadline"):
            action(deadline=deadline)
    with pytest.raises(TypeError):
        vol.pread(aligned(512), 0, deadline="soon")


def test_single_calls_refuse_bad_offsets(vol: kvio.Volume) -> None:
    for action in (vol.pread, vol.pwrite):
        with pytest.raises(ValueError, match="negative"):
            action(aligned(512), -512)
        with pytest.raises((ValueError, OverflowError)):
            action(aligned(512), 2**63)
        with pytest.raises(TypeError):
            action(aligned(512), "0")
        with pytest.raises(TypeError):
            action(aligned(512), 0.5)
    for offset, length in ((-1, 512), (0, -512)):
        with pytest.raises(ValueError, match="negative"):
            vol.discard(offset, length)


def test_errors_must_be_a_list(vol: kvio.Volume) -> None:
    with pytest.raises(TypeError):
        vol.read_batch([0], [aligned(512)], errors=())


def test_read_only_volume_refuses_every_change(path: Path) -> None:
    with kvio.Volume.open([path], direct="prefer") as vol:
        for action in (
            lambda: vol.pwrite(aligned(4096), 0),
            lambda: vol.write_batch([0], [aligned(4096)]),
            lambda: vol.submit_write([0], [aligned(4096)]),
            lambda: vol.discard(0, 4096),
            vol.flush,
        ):
            with pytest.raises(ValueError, match="read-only"):
                action()
        assert vol.pread(aligned(4096), 0) == 4096
    assert path.read_bytes() == FILL * MIB


def test_closed_volume_says_so(path: Path) -> None:
    vol = kvio.Volume.open([path], mode="rw", direct="prefer")
    vol.close()
    vol.close()
    assert vol.closed
    for action in (
        lambda: vol.pread(aligned(512), 0),
        lambda: vol.pwrite(aligned(512), 0),
        lambda: vol.read_batch([0], [aligned(512)]),
        lambda: vol.submit_read([0], [aligned(512)]),
        lambda: vol.register(aligned(4096)),
        vol.flush,
    ):
        with pytest.raises(kvio.KvioError, match="closed") as caught:
            action()
        assert caught.value.error_class == "shutdown"
    assert "closed" in repr(vol)
    vol.stats()  # what was counted stays readable


def test_unaligned_is_refused_where_that_was_asked_for(tmp_path: Path, path: Path) -> None:
    with kvio.Volume.open([path], mode="rw", direct="prefer", unaligned="refuse") as vol:
        if vol.alignment == 1:
            pytest.skip("this file system has no O_DIRECT: everything is aligned")
        assert vol.pread(aligned(4096), 4096) == 4096
        for buffer, offset in ((aligned(4096), 1), (aligned(100), 0), (aligned(4096, skew=1), 0)):
            with pytest.raises(ValueError, match="not aligned"):
                vol.pread(buffer, offset)
        assert vol.stats().bounced == 0


def test_write_of_part_of_a_block_is_refused(vol: kvio.Volume) -> None:
    if vol.alignment == 1:
        pytest.skip("this file system has no O_DIRECT: there are no blocks")
    for buffer, offset in ((aligned(100), 0), (aligned(4096), 1)):
        with pytest.raises(ValueError, match=r"multiples of vol\.alignment"):
            vol.pwrite(buffer, offset)


def test_wrong_arguments_between_right_ones_never_crash(path: Path) -> None:
    """Goal: an argument error frees only what the call has made. Method: thousands of wrong calls
    at changing stack depths, in a child that may die."""
    out = run_child(
        """
vol = kvio.Volume.open([sys.argv[1]], mode="rw", direct="prefer")
wrong = [([0, 4096], [bytearray(4096)]), ([0], None), ([0], 5), ([0], [5]), ([0], [[5]]),
         ([0], [None]), ([0, 1, 2], bytearray(4097)), ([0, 0], [bytearray(1)] * 3),
         ([0], [[bytearray(4096), 3]]), ([2**63 - 1], [bytearray(4096)]), ([-1], [b""]),
         ([0], (np.zeros(1, np.uint64), np.full(1, 512, np.uint64))),
         (np.zeros(2, np.int64), (np.zeros(4, np.uint64)[::2], np.zeros(4, np.uint64)[::2]))]
def deep(n, f):
    return f() if n == 0 else deep(n - 1, f)
def all_wrong():
    refused = 0
    for call in (vol.read_batch, vol.write_batch, vol.submit_read, vol.submit_write):
        for offsets, buffers in wrong:
            try:
                call(offsets, buffers)
            except (ValueError, TypeError, BufferError):
                refused += 1
    return refused
for i in range(200):
    assert deep(i % 40, all_wrong) >= 4 * (len(wrong) - 2)
    parts = [aligned(4096) for _ in range(i % 9)]
    assert vol.read_batch([0] * len(parts), parts).tolist() == [4096] * len(parts)
vol.close()
print("survived")
""",
        path,
    )
    assert out == "survived\n"


# ---- options of open ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("mode", "w", ValueError),
        ("mode", None, ValueError),
        ("direct", "yes", ValueError),
        ("direct", None, ValueError),
        ("engine", "libaio", ValueError),
        ("engine", 1, ValueError),
        ("unaligned", "copy", ValueError),
        ("stripe_unit", 0, ValueError),
        ("stripe_unit", -4096, ValueError),
        ("stripe_unit", 4095, ValueError),
        ("stripe_unit", 256, ValueError),
        ("stripe_unit", 2**41, ValueError),
        ("stripe_unit", 2**70, ValueError),
        ("stripe_unit", 4096.0, TypeError),
        ("stripe_unit", True, TypeError),
        ("queue_depth", 0, ValueError),
        ("queue_depth", 4097, ValueError),
        ("queue_depth", "64", TypeError),
        ("max_inflight", 0, ValueError),
        ("max_inflight", 5000, ValueError),
        ("max_inflight_bytes", -1, ValueError),
        ("submit_batch", 0, ValueError),
        ("deadline", 0, ValueError),
        ("deadline", -1.0, ValueError),
        ("workers", 257, ValueError),
        ("io_threads", 0, ValueError),
        ("io_threads", 1025, ValueError),
    ],
)
def test_bad_option_is_named(option: str, value: Any, error: type[Exception], path: Path) -> None:
    options: dict[str, Any] = {"direct": "prefer", option: value}
    with pytest.raises(error, match=option):
        kvio.Volume.open([path], **options)


@pytest.mark.parametrize(
    ("members", "error", "words"),
    [
        ([], ValueError, "1 to 256 members"),
        ("/dev/zero", TypeError, "a list of paths"),
        (b"/dev/zero", TypeError, "a list of paths"),
        (Path("/dev/zero"), TypeError, "a list of paths"),
        (["/dev/zero"] * 257, ValueError, "at most 256"),
        ([None], TypeError, "NoneType"),
        ([5], TypeError, "int"),
        (["a\0b"], ValueError, "NUL"),
        (5, TypeError, "int"),
    ],
    ids=str,
)
def test_bad_members_argument(members: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kvio.Volume.open(members)


def test_option_for_another_engine_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="io_uring"):
        kvio.Volume.open([path], engine="threads", iopoll=True, direct="prefer")
    with pytest.raises(kvio.KvioError, match="character device"):
        kvio.Volume.open([path], engine="io_uring_cmd", direct="prefer")


def test_volume_and_batch_have_no_other_way_in() -> None:
    with pytest.raises(TypeError, match=r"Volume\.open"):
        kvio.Volume()
    empty = kvio.Batch.__new__(kvio.Batch)
    for action in (empty.done, empty.wait, empty.results, empty.errors):
        with pytest.raises(ValueError, match="submit_read"):
            action()
    unopened = kvio.Volume.__new__(kvio.Volume)
    assert unopened.closed
    with pytest.raises(ValueError, match="never opened"):
        unopened.pread(bytearray(1), 0)
