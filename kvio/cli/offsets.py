"""Where each I/O of a job goes: numpy arrays of byte offsets, made in chunks.

Invariants
  O1  Every offset is a multiple of the block size from the region's start, and the whole block
      lies inside the region.
  O2  A sequential pass, and a uniform random pass without norandommap, visits every block of the
      region exactly once before any block a second time.
  O3  The same seed gives the same offsets, whatever the sizes of the chunks taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvio.cli import units
from kvio.cli.common import UsageError

Blocks = npt.NDArray[np.uint64]
_DRAW = 4096  # random numbers are drawn in blocks of this many, so that chunk sizes do not matter


@dataclass(frozen=True, slots=True)
class Distribution:
    """How random offsets spread over the region.

    Attributes
    ----------
    kind : random, zipf, pareto, normal, zoned or zoned_abs
    value : zipf's theta, pareto's h, normal's deviation in percent of the region
    center : middle of the normal distribution, 0 to 1
    zones : (share of accesses in percent, size in percent or bytes) for the zoned kinds
    """

    kind: str = "random"
    value: float = 0.0
    center: float = 0.5
    zones: tuple[tuple[float, float], ...] = ()


def parse_distribution(text: str, kb_base: int = 1024) -> Distribution:
    """Read fio's random_distribution."""
    kind, _, rest = text.strip().partition(":")
    if kind == "gauss":
        kind = "normal"
    if kind == "random" and not rest:
        return Distribution()
    if kind in ("zoned", "zoned_abs"):
        return Distribution(kind, zones=_parse_zones(text, rest.split(",")[0], kind, kb_base))
    if kind not in ("zipf", "pareto", "normal"):
        raise UsageError(
            f"random_distribution={text} is not random, zipf, pareto, normal, zoned or zoned_abs"
        )
    try:
        numbers = [float(part) for part in rest.split(",")[0].split(":")]
    except ValueError:
        raise UsageError(f"random_distribution={text} needs a number, such as zipf:1.1") from None
    value, center = numbers[0], numbers[1] if len(numbers) > 1 else 0.5
    if len(numbers) > 2 or (len(numbers) == 2 and kind != "normal"):
        raise UsageError(
            f"random_distribution={text}: only normal takes a center, kvio scatters the hot blocks"
        )
    if not 0 <= center <= 1:
        raise UsageError(f"random_distribution={text}: the center is not between 0 and 1")
    if kind == "zipf" and not 0 < value <= 10:
        raise UsageError(f"random_distribution={text}: theta is not above 0 and up to 10")
    if kind == "pareto" and not 0 < value < 1:
        raise UsageError(f"random_distribution={text}: the pareto power is not between 0 and 1")
    if kind == "normal" and not 0 < value <= 100:
        raise UsageError(
            f"random_distribution={text}: the deviation is not above 0 and up to 100 percent"
        )
    return Distribution(kind, value, center)


def _parse_zones(text: str, rest: str, kind: str, kb_base: int) -> tuple[tuple[float, float], ...]:
    zones = []
    for part in rest.split(":"):
        access, slash, size = part.partition("/")
        try:
            share = float(access)
        except ValueError:
            share = -1.0
        if not slash or not 0 <= share <= 100:
            raise UsageError(f"random_distribution={text}: {part!r} is not ACCESS_PERCENT/SIZE")
        extent = (
            units.parse_int(size.rstrip("%"))
            if kind == "zoned"
            else units.parse_size(size, kb_base=kb_base)
        )
        zones.append((share, float(extent)))
    if abs(sum(share for share, _ in zones) - 100) > 1e-6:
        raise UsageError(f"random_distribution={text}: the accesses do not add up to 100 percent")
    if kind == "zoned" and abs(sum(size for _, size in zones) - 100) > 1e-6:
        raise UsageError(f"random_distribution={text}: the sizes do not add up to 100 percent")
    return tuple(zones)


class Permutation:
    """A keyed bijection of [0, count) that needs no memory.

    Multiplications by odd numbers and xor-shifts are bijections of [0, 2**bits); a value that
    falls outside [0, count) is sent through again until it is inside (cycle walking).
    """

    def __init__(self, count: int, seed: int) -> None:
        assert count > 0
        self.count = count
        bits = max(1, (count - 1).bit_length())
        self._mask = np.uint64((1 << bits) - 1)
        self._shift = np.uint64((bits + 1) // 2)
        keys = np.random.default_rng([0x7065726D, seed]).integers(
            0, 1 << 63, size=(3, 2), dtype=np.uint64
        )
        self._rounds = [(np.uint64(a) | np.uint64(1), np.uint64(b)) for a, b in keys]

    def __call__(self, values: Blocks) -> Blocks:
        found = self._once(values)
        outside = np.flatnonzero(found >= self.count)
        while outside.size:
            again = self._once(found[outside])
            found[outside] = again
            outside = outside[again >= self.count]
        return found

    def _once(self, values: Blocks) -> Blocks:
        found = values.copy()
        for multiplier, addend in self._rounds:
            found *= multiplier
            found += addend
            found &= self._mask
            found ^= found >> self._shift
        return found


class Source(Protocol):
    """An endless sequence of block numbers."""

    def take(self, count: int) -> Blocks: ...


class Sequential:
    """0, 1, 2, ... and again from 0."""

    def __init__(self, blocks: int) -> None:
        self._blocks, self._next = blocks, 0

    def take(self, count: int) -> Blocks:
        found = (self._next + np.arange(count, dtype=np.uint64)) % np.uint64(self._blocks)
        self._next = (self._next + count) % self._blocks
        return found


class Shuffled:
    """Every block once in random order, then again in another order."""

    def __init__(self, blocks: int, seed: int) -> None:
        self._blocks, self._seed, self._next, self._pass = blocks, seed, 0, 0
        self._order = Permutation(blocks, seed)

    def take(self, count: int) -> Blocks:
        parts = []
        while count:
            step = min(count, self._blocks - self._next)
            parts.append(self._order(np.arange(self._next, self._next + step, dtype=np.uint64)))
            self._next += step
            count -= step
            if self._next == self._blocks:
                self._next, self._pass = 0, self._pass + 1
                self._order = Permutation(self._blocks, self._seed + self._pass * 15485863)
        return (
            parts[0]
            if len(parts) == 1
            else np.concatenate(parts)
            if parts
            else np.empty(0, np.uint64)
        )


class Drawn:
    """Independent draws from a distribution; blocks repeat."""

    def __init__(self, blocks: int, block_size: int, distribution: Distribution, seed: int) -> None:
        self._blocks, self._distribution = blocks, distribution
        self._rng = np.random.default_rng([0x64726177, seed])
        self._scatter = Permutation(blocks, seed)
        self._ready = np.empty(0, np.uint64)
        self._zone_edges, self._zone_shares = _zone_blocks(blocks, block_size, distribution)

    def take(self, count: int) -> Blocks:
        parts, have = [self._ready], self._ready.size
        while have < count:
            parts.append(self._draw())
            have += parts[-1].size
        joined = np.concatenate(parts) if len(parts) > 1 else self._ready
        self._ready = joined[count:]
        return joined[:count]

    def _draw(self) -> Blocks:
        kind, rng, blocks = self._distribution.kind, self._rng, self._blocks
        if kind == "random":
            return rng.integers(0, blocks, _DRAW, dtype=np.uint64)
        if kind == "zipf":
            # The most popular blocks are scattered: rank 1 is not block 0.
            return self._scatter(zipf_ranks(rng, blocks, self._distribution.value, _DRAW))
        if kind == "pareto":
            return self._scatter(pareto_ranks(rng, blocks, self._distribution.value, _DRAW))
        if kind == "normal":
            deviation = blocks * self._distribution.value / 100
            drawn = rng.normal(blocks * self._distribution.center, deviation, _DRAW)
            return np.clip(drawn, 0, blocks - 1).astype(np.uint64)
        zone = np.searchsorted(self._zone_shares, rng.random(_DRAW), side="right")
        zone = np.minimum(zone, len(self._zone_shares) - 1)
        start, end = self._zone_edges[zone], self._zone_edges[zone + 1]
        drawn = start + (rng.random(_DRAW) * (end - start))
        return np.minimum(drawn, blocks - 1).astype(np.uint64)


def _zone_blocks(
    blocks: int, block_size: int, distribution: Distribution
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Edges of the zones in blocks, and the cumulated shares of the accesses."""
    sizes = np.array([size for _, size in distribution.zones] or [100.0])
    shares = np.array([share for share, _ in distribution.zones] or [100.0])
    in_blocks = sizes / block_size if distribution.kind == "zoned_abs" else sizes / 100 * blocks
    edges = np.minimum(np.concatenate([[0.0], np.cumsum(in_blocks)]), blocks)
    if distribution.kind == "zoned_abs" and edges[-2] >= blocks and len(sizes) > 1:
        raise UsageError(
            "random_distribution: the zones are larger than the region that is worked on"
        )
    edges[-1] = max(edges[-1], min(blocks, edges[-2] + 1))
    return edges, np.cumsum(shares) / 100


def zipf_ranks(rng: np.random.Generator, count: int, theta: float, size: int) -> Blocks:
    """Ranks 0..count-1 with probability proportional to (rank + 1) ** -theta.

    Rejection-inversion sampling (W. Hoermann, G. Derflinger: Rejection-inversion to generate
    variates from monotone discrete distributions, ACM TOMACS 6(3), 1996): exact for every count,
    without a table.
    """

    def integral(x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        log_x = np.log(x)
        scaled = log_x if theta == 1 else np.expm1((1 - theta) * log_x) / (1 - theta)
        return np.asarray(scaled, np.float64)

    def inverse(y: npt.ArrayLike) -> npt.NDArray[np.float64]:
        y = np.asarray(y)
        return (
            np.exp(y)
            if theta == 1
            else np.exp(np.log1p(np.maximum(y * (1 - theta), -1 + 1e-15)) / (1 - theta))
        )

    low, high = float(integral(1.5)) - 1.0, float(integral(count + 0.5))
    near = 2.0 - float(inverse(float(integral(2.5)) - 2.0**-theta))
    out = np.empty(size, np.uint64)
    filled = 0
    while filled < size:
        y = high + rng.random(size - filled) * (low - high)
        x = inverse(y)
        rank = np.clip(np.floor(x + 0.5), 1, count)
        accepted = rank[(rank - x <= near) | (y >= integral(rank + 0.5) - rank**-theta)]
        out[filled : filled + accepted.size] = accepted.astype(np.uint64) - np.uint64(1)
        filled += accepted.size
    return out


def pareto_ranks(rng: np.random.Generator, count: int, h: float, size: int) -> Blocks:
    """Self-similar ranks: a share 1-h of the accesses goes to a share h of the blocks.

    Gray et al.: Quickly generating billion-record synthetic databases, SIGMOD 1994.
    """
    power = np.log(h) / np.log1p(-h)
    ranks = np.floor(count * rng.random(size) ** power)
    return np.asarray(np.minimum(ranks, count - 1), np.uint64)


class OffsetStream(Protocol):
    """Byte offsets of one direction of one job, without end."""

    def take(self, count: int) -> npt.NDArray[np.int64]: ...


@dataclass(slots=True)
class BlockStream:
    """Byte offsets of the blocks that a source names."""

    source: Source
    block_size: int
    start: int

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next ``count`` offsets in the volume, in bytes."""
        blocks = self.source.take(count).astype(np.int64)
        blocks *= self.block_size
        blocks += self.start
        return blocks


def make_stream(
    *,
    start: int,
    length: int,
    block_size: int,
    random: bool,
    distribution: Distribution,
    norandommap: bool,
    seed: int,
) -> OffsetStream:
    """The stream for one direction. ``length`` bytes from ``start`` hold at least one block."""
    blocks = length // block_size
    if blocks < 1:
        raise UsageError(f"a region of {length} bytes holds no block of {block_size}")
    source: Source
    if not random:
        source = Sequential(blocks)
    elif distribution.kind == "random" and not norandommap:
        source = Shuffled(blocks, seed)
    else:
        source = Drawn(blocks, block_size, distribution, seed)
    return BlockStream(source, block_size, start)


class Interleaved:
    """Several streams taking turns, one offset each."""

    def __init__(self, streams: Sequence[OffsetStream]) -> None:
        self._streams = list(streams)
        self._turn = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next ``count`` offsets, in bytes."""
        total = len(self._streams)
        found = np.empty(count, np.int64)
        for index in range(total):
            stream = self._streams[(self._turn + index) % total]
            places = found[index::total]
            places[:] = stream.take(places.size)
        self._turn = (self._turn + count) % total
        return found


class Prefetched:
    """A stream that is asked for many offsets at once, for takers of a few at a time."""

    def __init__(self, stream: OffsetStream) -> None:
        self._stream = stream
        self._ready = np.empty(0, np.int64)
        self._next = 0

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """The next ``count`` offsets, in bytes."""
        if self._next + count > self._ready.size:
            more = self._stream.take(max(_DRAW, count))
            self._ready = np.concatenate([self._ready[self._next :], more])
            self._next = 0
        self._next += count
        return self._ready[self._next - count : self._next]
