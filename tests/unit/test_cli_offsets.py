"""Offsets: coverage without repeats, distributions, and independence of chunk sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.cli import offsets
from kvio.cli.common import UsageError
from kvio.cli.offsets import Distribution, Interleaved, Permutation, make_stream, parse_distribution


def stream(blocks: int, *, seed: int = 1, block: int = 4096, start: int = 0, **kind: object):  # type: ignore[no-untyped-def]
    options = {"random": True, "distribution": Distribution(), "norandommap": False, **kind}
    return make_stream(start=start, length=blocks * block, block_size=block, seed=seed, **options)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**40))
def test_permutation_is_a_bijection(count: int, seed: int) -> None:
    found = Permutation(count, seed)(np.arange(count, dtype=np.uint64))
    assert np.array_equal(np.sort(found), np.arange(count, dtype=np.uint64))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 700), st.lists(st.integers(1, 90), min_size=1, max_size=40))
def test_a_random_pass_visits_every_block_once_whatever_the_chunks(
    blocks: int, sizes: list[int]
) -> None:
    # O2 and O3: the sequence is the same for any cut, and each pass covers the region.
    cut = stream(blocks)
    found = np.concatenate([cut.take(size) for size in sizes])
    whole = stream(blocks).take(sum(sizes))
    assert np.array_equal(found, whole)
    for first in range(0, len(found) - blocks + 1, blocks):
        passed = np.sort(found[first : first + blocks])
        assert np.array_equal(passed, np.arange(blocks) * 4096)


def test_passes_differ_and_seeds_differ() -> None:
    one = stream(1000)
    first, second = one.take(1000), one.take(1000)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, stream(1000, seed=2).take(1000))
    assert np.array_equal(first, stream(1000).take(1000))


def test_sequential_wraps_inside_the_region() -> None:
    found = stream(3, random=False, start=8192).take(7)
    assert found.tolist() == [8192, 12288, 16384, 8192, 12288, 16384, 8192]


def test_a_tail_smaller_than_a_block_is_left_alone() -> None:
    found = make_stream(
        start=0, length=10_000, block_size=4096, random=False, distribution=Distribution(),
        norandommap=False, seed=0,
    ).take(4)  # fmt: skip
    assert found.tolist() == [0, 4096, 0, 4096]
    with pytest.raises(UsageError, match="holds no block"):
        stream(0)


@pytest.mark.parametrize("theta", [0.5, 0.99, 1.0, 1.1, 2.0])
def test_zipf_has_the_exact_probabilities(theta: float) -> None:
    # Method: chi-square against rank ** -theta; 5 sigma above its mean would be a wrong sampler.
    count, draws = 60, 200_000
    seen = np.bincount(
        offsets.zipf_ranks(np.random.default_rng(5), count, theta, draws).astype(int),
        minlength=count,
    )
    weights = np.arange(1, count + 1) ** -theta
    expected = draws * weights / weights.sum()
    chi = float((((seen - expected) ** 2) / expected).sum())
    assert chi < (count - 1) + 5 * np.sqrt(2 * (count - 1))


def test_a_wrong_theta_would_be_noticed() -> None:
    # The mutant for the test above: samples of 1.05 do not pass for 1.1.
    count, draws = 60, 200_000
    seen = np.bincount(
        offsets.zipf_ranks(np.random.default_rng(5), count, 1.05, draws).astype(int),
        minlength=count,
    )
    weights = np.arange(1, count + 1) ** -1.1
    expected = draws * weights / weights.sum()
    assert float((((seen - expected) ** 2) / expected).sum()) > (count - 1) + 5 * np.sqrt(2 * count)


def test_zipf_on_huge_and_tiny_regions() -> None:
    rng = np.random.default_rng(1)
    assert offsets.zipf_ranks(rng, 1, 1.2, 100).max() == 0
    assert offsets.zipf_ranks(rng, 2**40, 1.2, 5000).max() < 2**40


def test_hot_blocks_of_zipf_are_scattered() -> None:
    found = stream(100_000, distribution=Distribution("zipf", 1.2)).take(20_000) // 4096
    values, counts = np.unique(found, return_counts=True)
    hottest = values[np.argsort(counts)[-10:]]
    assert counts.max() > 1000
    assert hottest.max() - hottest.min() > 10_000


def test_pareto_gives_a_share_of_accesses_to_a_share_of_blocks() -> None:
    ranks = offsets.pareto_ranks(np.random.default_rng(2), 10_000, 0.2, 100_000)
    assert (ranks < 2000).mean() == pytest.approx(0.8, abs=0.01)


def test_normal_is_centered_and_stays_inside() -> None:
    found = stream(1000, distribution=Distribution("normal", 10.0)).take(50_000) // 4096
    assert found.mean() == pytest.approx(500, abs=5)
    assert found.std() == pytest.approx(100, rel=0.05)
    edge = stream(1000, distribution=Distribution("normal", 50.0, 0.0)).take(5000) // 4096
    assert edge.min() >= 0
    assert edge.max() < 1000


def test_zones_get_their_shares() -> None:
    kind = parse_distribution("zoned:60/10:30/20:8/30:2/40")
    found = stream(10_000, distribution=kind).take(100_000) // 4096
    for low, high, share in ((0, 1000, 0.6), (1000, 3000, 0.3), (3000, 6000, 0.08)):
        assert ((found >= low) & (found < high)).mean() == pytest.approx(share, abs=0.01)


def test_absolute_zones() -> None:
    kind = parse_distribution("zoned_abs:90/4m:10/36m")
    found = stream(10_240, distribution=kind).take(50_000)
    assert (found < 4 << 20).mean() == pytest.approx(0.9, abs=0.01)
    with pytest.raises(UsageError, match="larger than the region"):
        stream(100, distribution=kind)


def test_norandommap_repeats_blocks() -> None:
    found = stream(1000, norandommap=True).take(1000)
    assert len(np.unique(found)) < 900


@pytest.mark.parametrize(
    "text",
    ["zipf", "zipf:", "zipf:0", "zipf:-1", "pareto:1", "normal:0", "normal:200", "uniform",
     "zipf:1.1:0.5", "normal:10:2", "zoned:50/50", "zoned:x/100", "zoned:100"],
)  # fmt: skip
def test_bad_distributions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="random_distribution"):
        parse_distribution(text)


def test_interleaved_streams_take_turns_whatever_the_chunks() -> None:
    def make() -> Interleaved:
        return Interleaved([stream(8, random=False, start=i << 20) for i in range(3)])

    one, other = make(), make()
    whole = one.take(20)
    cut = np.concatenate([other.take(n) for n in (1, 4, 2, 7, 6)])
    assert np.array_equal(whole, cut)
    assert (whole >> 20).tolist() == [i % 3 for i in range(20)]
