"""verify: every kind of wrong block fails its check, each with a reason of its own."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.cli.common import UsageError
from kvio.cli.verify import HEADER_BYTES, Headers, Pattern, find_digest, parse_pattern

ALWAYS = ["meta", "crc32", "md5", "sha1", "sha256", "sha512", "sha3-224", "sha3-256", "sha3-384",
          "sha3-512"]  # fmt: skip
OPTIONAL = [name for name in ("crc32c", "xxhash") if importlib.util.find_spec(name)]


def filled(headers: Headers, offset: int, size: int = 4096) -> np.ndarray:
    block = np.zeros(size, np.uint8)
    headers.fill(block, offset)
    return block


@pytest.mark.parametrize("algorithm", ALWAYS + OPTIONAL)
def test_what_was_written_passes(algorithm: str) -> None:
    headers = Headers(algorithm, 4096, seed=9)
    for offset in (0, 4096, 1 << 40):
        assert headers.check(filled(headers, offset), offset, own=True) is None


def test_known_answers() -> None:
    # The algorithms are what they are called: check values of the public test vectors.
    data = memoryview(b"123456789")
    nothing = memoryview(b"")
    assert find_digest("crc32")(nothing, data) == 0xCBF43926.to_bytes(4, "little")
    assert find_digest("md5")(data, nothing).hex() == "25f9e794323b453885f5181f1b624d0b"
    if "crc32c" in OPTIONAL:
        assert find_digest("crc32c")(nothing, data) == 0xE3069283.to_bytes(4, "little")


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 4095), st.integers(0, 7), st.sampled_from([a for a in ALWAYS if a != "meta"]))
def test_any_flipped_bit_is_found(at: int, bit: int, algorithm: str) -> None:
    headers = Headers(algorithm, 4096, seed=3)
    block = filled(headers, 8192)
    block[at] ^= 1 << bit
    padding = 32 + len(find_digest(algorithm)(memoryview(b""), memoryview(b"")))
    if padding <= at < HEADER_BYTES:
        return  # bytes behind a short checksum: compared too, see below
    assert headers.check(block, 8192, own=True) is not None


def test_the_padding_of_a_checksum_is_compared_too() -> None:
    headers = Headers("crc32", 4096, seed=3)
    block = filled(headers, 0)
    block[HEADER_BYTES - 1] ^= 1
    assert headers.check(block, 0, own=True) is not None


def test_each_kind_of_wrong_block_has_its_reason() -> None:
    headers = Headers("crc32", 4096, seed=3)
    never = headers.check(np.zeros(4096, np.uint8), 0, own=True)
    moved = headers.check(filled(headers, 4096), 8192, own=True)
    other = headers.check(filled(Headers("crc32", 4096, seed=4), 0), 0, own=True)
    torn = filled(headers, 0)
    torn[2048:] = 0
    sized = headers.check(filled(Headers("crc32", 8192, seed=3), 0, 8192)[:4096], 0, own=True)
    reasons = [str(bad) for bad in (never, moved, other, headers.check(torn, 0, own=True), sized)]
    assert "no header that kvio wrote" in reasons[0]
    assert "misplaced: this is the block of offset 4096" in reasons[1]
    assert "stale" in reasons[2]
    assert "damaged" in reasons[3]
    assert "8192 bytes, not 4096" in reasons[4]
    assert "volume offset 8192" in reasons[1]


def test_another_run_may_check_what_this_one_wrote() -> None:
    block = filled(Headers("crc32", 4096, seed=3), 0)
    later = Headers("md5", 4096, seed=77)  # the header says which checksum it has
    assert later.check(block, 0, own=False) is None
    assert later.check(block, 0, own=True) is not None


def test_contents_depend_on_the_address_and_the_seed_alone() -> None:
    one, two = Headers("crc32", 4096, seed=3), Headers("crc32", 4096, seed=3)
    assert np.array_equal(filled(one, 4096), filled(two, 4096))
    assert not np.array_equal(filled(one, 4096)[64:], filled(one, 8192)[64:])


def test_intervals_carry_their_own_headers() -> None:
    headers = Headers("crc32", 4096, seed=1)
    block = filled(headers, 65536, 16384)
    assert headers.check(block, 65536, own=True) is None
    assert headers.check(block[4096:8192], 65536 + 4096, own=True) is None
    block[9000] ^= 1
    bad = headers.check(block, 65536, own=True)
    assert bad is not None
    assert bad.offset == 65536 + 8192


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("0xdeadbeef", [b"\xde\xad\xbe\xef"]),
        ("0xabc", [b"\x0a\xbc"]),
        ("255", [b"\xff"]),
        ("-1", [b"\xff\xff\xff\xff"]),
        ('"abcd"', [b"abcd"]),
        ('0xff%o"ab"7', [b"\xff", None, b"ab", b"\x07"]),
    ],
)
def test_patterns(text: str, pieces: list[bytes | None]) -> None:
    assert parse_pattern(text) == pieces


@pytest.mark.parametrize("text", ["", "0x", "abc", '"', '""', "0xzz", "%q", "-"])
def test_bad_patterns_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a pattern"):
        parse_pattern(text)


@pytest.mark.parametrize("text", ["0xdeadbeef", '%o"x"', "7"])
def test_pattern_blocks(text: str) -> None:
    pattern = Pattern(text, 4096)
    block = np.zeros(8192, np.uint8)
    pattern.fill(block, 12288)
    assert pattern.check(block, 12288, own=True) is None
    block[5000] ^= 0x80
    bad = pattern.check(block, 12288, own=True)
    assert bad is not None
    assert bad.offset == 12288 + 5000


def test_offset_patterns_find_misplaced_blocks() -> None:
    pattern = Pattern("%o", 4096)
    block = np.zeros(4096, np.uint8)
    pattern.fill(block, 4096)
    assert pattern.check(block, 8192, own=True) is not None
