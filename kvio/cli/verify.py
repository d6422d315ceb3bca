"""What verify writes into blocks, and how it is checked.

A block (or each verify_interval of it) starts with a header:

    offset  size  content
         0     8  magic "kvioVfy1"
         8     8  byte offset in the volume, where the block belongs
        16     4  length of the block in bytes
        20     2  algorithm of the checksum
        22     2  zero
        24     8  seed of the run that wrote it
        32    32  checksum over bytes 0..31 and 64..end, zero padded, cut at 32 bytes

Invariants
  V1  The bytes of a block depend on its offset, its length and the run's seed alone, so two writes
      of one block in one run agree and their order does not matter.
  V2  A block that was never written, was written by another run, belongs to another address, is
      torn or has a flipped bit fails the check, each with a reason of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvio.cli.common import UsageError

if TYPE_CHECKING:
    from kvio.cli.jobs import Job

Bytes = npt.NDArray[np.uint8]
Digest = Callable[[memoryview, memoryview], bytes]

MAGIC = b"kvioVfy1"
HEADER = struct.Struct("<8sQIHHQ")
HEADER_BYTES = 64
_DIGEST_BYTES = 32

# Numbers are on the disk: never reuse one.
_ALGORITHMS = {
    "meta": 0,
    "crc32": 1,
    "crc32c": 2,
    "xxhash": 3,
    "md5": 4,
    "sha1": 5,
    "sha256": 6,
    "sha512": 7,
    "sha3-224": 8,
    "sha3-256": 9,
    "sha3-384": 10,
    "sha3-512": 11,
}
_NAMES = {number: name for name, number in _ALGORITHMS.items()}


def _crc(function: Callable[[memoryview, int], int]) -> Digest:
    return lambda head, body: function(body, function(head, 0)).to_bytes(4, "little")


def _hash(make: Callable[[], object]) -> Digest:
    def digest(head: memoryview, body: memoryview) -> bytes:
        state = make()
        state.update(head)  # type: ignore[attr-defined]
        state.update(body)  # type: ignore[attr-defined]
        found: bytes = state.digest()  # type: ignore[attr-defined]
        return found[:_DIGEST_BYTES]

    return digest


def find_digest(name: str) -> Digest:
    """The checksum function of an algorithm.

    Raises
    ------
    UsageError
        The algorithm is unknown, or the package that computes it is not installed.
    """
    if name == "meta":
        return lambda head, body: b""
    if name == "crc32":
        return _crc(zlib.crc32)
    if name in ("md5", "sha1", "sha256", "sha512"):
        return _hash(lambda: hashlib.new(name, usedforsecurity=False))
    if name.startswith("sha3-") and name in _ALGORITHMS:
        return _hash(lambda: hashlib.new(name.replace("-", "_")))
    module, package = {"crc32c": ("crc32c", "crc32c"), "xxhash": ("xxhash", "xxhash")}.get(
        name, ("", "")
    )
    if not module:
        raise UsageError(f"verify={name} is not one of {', '.join(_ALGORITHMS)}, pattern")
    try:
        found = importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"verify={name} needs the Python package {package} (pip install {package}); "
            "verify=crc32 needs none"
        ) from None
    return _crc(found.crc32c) if name == "crc32c" else _hash(found.xxh3_128)


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that failed its check."""

    offset: int
    reason: str

    def __str__(self) -> str:
        return f"bad block at volume offset {self.offset}: {self.reason}"


class Headers:
    """Contents with a header in every ``unit`` bytes."""

    def __init__(self, algorithm: str, unit: int, seed: int) -> None:
        self.unit, self.seed = unit, seed & (2**64 - 1)
        self._algorithm = _ALGORITHMS[algorithm]
        self._digests: dict[int, Digest] = {self._algorithm: find_digest(algorithm)}
        self._random = np.random.default_rng([0x76657266, seed]).integers(
            0, 256, 2 * unit, dtype=np.uint8
        )

    def fill(self, block: Bytes, offset: int) -> None:
        """Write the contents of the block that belongs at ``offset`` bytes."""
        for start in range(0, block.size, self.unit):
            self._fill_unit(block[start : start + self.unit], offset + start)

    def _fill_unit(self, unit: Bytes, offset: int) -> None:
        begin = (offset // self.unit * 0x9E3779B97F4A7C15 + self.seed) % self.unit
        unit[HEADER_BYTES:] = self._random[begin : begin + unit.size - HEADER_BYTES]
        view = unit.data
        HEADER.pack_into(view, 0, MAGIC, offset, unit.size, self._algorithm, 0, self.seed)
        digest = self._digests[self._algorithm](view[: HEADER.size], view[HEADER_BYTES:])
        view[HEADER.size : HEADER_BYTES] = digest.ljust(_DIGEST_BYTES, b"\0")

    def check(self, block: Bytes, offset: int, *, own: bool) -> BadBlock | None:
        """The first bad unit of a block, or None. ``own``: this run wrote it; the seed counts."""
        for start in range(0, block.size, self.unit):
            reason = self._check_unit(block[start : start + self.unit], offset + start, own)
            if reason:
                return BadBlock(offset + start, reason)
        return None

    def _check_unit(self, unit: Bytes, offset: int, own: bool) -> str:
        view = unit.data
        magic, where, length, algorithm, zero, seed = HEADER.unpack_from(view)
        if magic != MAGIC:
            return (
                f"holds no header that kvio wrote (it starts with {bytes(view[:16]).hex(' ', 4)})"
            )
        if algorithm not in _NAMES or zero:
            return f"the header is damaged (checksum algorithm {algorithm})"
        if algorithm not in self._digests:
            self._digests[algorithm] = find_digest(_NAMES[algorithm])
        digest = self._digests[algorithm](view[: HEADER.size], view[HEADER_BYTES:]).ljust(
            _DIGEST_BYTES, b"\0"
        )
        if where != offset:
            return f"misplaced: this is the block of offset {where}"
        if length != unit.size:
            return (
                f"was written as a block of {length} bytes, not {unit.size} (see verify_interval)"
            )
        if own and seed != self.seed:
            return f"stale: written by a run with seed {seed:#x}, this one has {self.seed:#x}"
        if digest != bytes(view[HEADER.size : HEADER_BYTES]):
            return f"{_NAMES[algorithm]} does not match: the contents are damaged"
        return ""


class Pattern:
    """Contents that are a repeated pattern, without a header (verify=pattern)."""

    def __init__(self, text: str, unit: int) -> None:
        self.unit = unit
        self._pieces = parse_pattern(text)
        self._expected = np.empty(unit, np.uint8)
        self._fixed = None not in self._pieces
        if self._fixed:
            self._tile(self._expected, 0)

    def _tile(self, out: Bytes, offset: int) -> None:
        piece = b"".join(
            offset.to_bytes(8, "little") if part is None else part for part in self._pieces
        )
        repeated = np.frombuffer(piece * (out.size // len(piece) + 1), np.uint8)
        out[:] = repeated[: out.size]

    def fill(self, block: Bytes, offset: int) -> None:
        """Write the pattern into a block."""
        for start in range(0, block.size, self.unit):
            self._tile(block[start : start + self.unit], offset + start)

    def check(self, block: Bytes, offset: int, *, own: bool) -> BadBlock | None:
        """The first byte that differs from the pattern, or None."""
        del own  # a pattern does not say who wrote it
        for start in range(0, block.size, self.unit):
            unit = block[start : start + self.unit]
            if not self._fixed:
                self._tile(self._expected, offset + start)
            if not np.array_equal(unit, self._expected):
                at = int(np.flatnonzero(unit != self._expected)[0])
                return BadBlock(
                    offset + start + at,
                    f"is {unit[at]:#04x}, the pattern has {self._expected[at]:#04x} there",
                )
        return None


def parse_pattern(text: str) -> list[bytes | None]:
    """Read fio's pattern: 0x hex digits, a decimal number, "text", %o (None), or several."""
    pieces: list[bytes | None] = []
    rest = text.strip()
    while rest:
        if rest.startswith('"'):
            end = rest.find('"', 1)
            if end < 2:
                break
            pieces.append(rest[1:end].encode())
            rest = rest[end + 1 :]
        elif rest.startswith("%o"):
            pieces.append(None)
            rest = rest[2:]
        elif rest[:2].lower() == "0x":
            digits = _leading(rest[2:], "0123456789abcdefABCDEF")
            if not digits:
                break
            pieces.append(bytes.fromhex(digits.zfill(len(digits) + len(digits) % 2)))
            rest = rest[2 + len(digits) :]
        else:
            digits = _leading(rest.lstrip("-"), "0123456789")
            if not digits:
                break
            sign = "-" if rest.startswith("-") else ""
            value = int(sign + digits) & 0xFFFFFFFF
            pieces.append(value.to_bytes(max(1, (value.bit_length() + 7) // 8), "little"))
            rest = rest[len(sign) + len(digits) :]
    if rest or not pieces:
        raise UsageError(f'{text!r} is not a pattern such as 0xdeadbeef, 123, "text" or %o')
    return pieces


def _leading(text: str, allowed: str) -> str:
    return text[: len(text) - len(text.lstrip(allowed))]


Contents = Headers | Pattern


def make_contents(job: Job, seed: int) -> Contents | None:
    """What the job's blocks hold, or None when it does not verify."""
    if job.verify is None:
        return None
    if job.verify == "pattern":
        return Pattern(job.verify_pattern or "", job.verify_interval)
    return Headers(job.verify, job.verify_interval, seed)


def check_settings(job: Job) -> None:
    """Refuse verify settings that cannot work, before anything is opened."""
    if job.buffer_pattern is not None:
        parse_pattern(job.buffer_pattern)
    if job.verify is None:
        return
    if job.verify == "pattern":
        if job.verify_pattern is None:
            raise UsageError("verify=pattern needs verify_pattern")
        parse_pattern(job.verify_pattern)
    else:
        find_digest(job.verify)
    for size in (job.read_bs, job.write_bs):
        if size % job.verify_interval:
            raise UsageError(f"verify_interval={job.verify_interval} does not divide bs={size}")
    if job.verify != "pattern" and job.verify_interval <= HEADER_BYTES:
        raise UsageError(
            f"verify_interval={job.verify_interval} has no room for a header of "
            f"{HEADER_BYTES} bytes"
        )
