"""Plans: budgets, mixes, rates, adaptive batches, and the list of written blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.cli import session
from kvio.cli.common import UsageError
from kvio.cli.jobfile import Section, Setting
from kvio.cli.jobspec import build_jobs
from kvio.cli.offsets import Distribution, make_stream
from kvio.cli.plan import READ, WRITE, Budget, OneWay, Paced, ReadBack, Written


def sequence(block: int = 4096):  # type: ignore[no-untyped-def]
    return make_stream(
        start=0, length=1 << 30, block_size=block, random=False, distribution=Distribution(),
        norandommap=False, seed=0,
    )  # fmt: skip


def paced(budget: Budget, **options: object) -> Paced:
    kind = {"batch": 4, "share_read": 0.5, "iops": (0.0, 0.0), **options}
    return Paced((sequence(), sequence()), (4096, 4096), budget, **kind)  # type: ignore[arg-type]


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 20))
def test_a_budget_never_grants_more_than_it_has(nbytes: int, ios: int, ask: int) -> None:
    budget = Budget(nbytes, ios)
    granted = [budget.grant(ask, 3) for _ in range(50)]
    assert sum(granted) == min(nbytes // 3, ios)
    assert all(part <= ask for part in granted)


def test_one_way_issues_exactly_its_budget() -> None:
    plan = OneWay(sequence(), READ, 4096, Budget(4096 * 10, None), (4, 64))
    sizes = []
    while chunk := plan.next(0.0):
        sizes.append(chunk.offsets.size)
    assert sizes == [4, 4, 2]


def test_batches_grow_with_speed_at_most_twofold_and_stay_in_their_limits() -> None:
    plan = OneWay(sequence(), READ, 4096, Budget(None, None), (4, 64))
    sizes = []
    for _ in range(6):
        chunk = plan.next(0.0)
        assert chunk is not None
        sizes.append(chunk.offsets.size)
        plan.took(chunk.offsets.size, 1e-6)
    assert sizes == [4, 8, 16, 32, 64, 64]
    plan.took(64, 10.0)  # the device became slow
    chunk = plan.next(0.0)
    assert chunk is not None
    assert chunk.offsets.size == 4


@settings(deadline=None)
@given(st.integers(1, 99), st.integers(1, 16))
def test_a_mix_keeps_its_share_after_every_chunk(percent: int, batch: int) -> None:
    plan = paced(Budget(None, None), share_read=percent / 100, batch=batch)
    issued = [0, 0]
    for _ in range(300):
        chunk = plan.next(0.0)
        assert chunk is not None
        issued[chunk.direction] += chunk.offsets.size
        assert abs(issued[READ] - sum(issued) * percent / 100) <= batch


def test_pure_directions() -> None:
    assert {paced(Budget(None, None), share_read=1.0).next(0).direction for _ in range(9)} == {READ}  # type: ignore[union-attr]
    assert {paced(Budget(None, None), share_read=0.0).next(0).direction for _ in range(9)} == {
        WRITE
    }  # type: ignore[union-attr]


def test_rates_space_the_chunks() -> None:
    plan = paced(Budget(None, None), share_read=1.0, iops=(100.0, 0.0), batch=2)
    due = [plan.next(5.0).due_s for _ in range(4)]  # type: ignore[union-attr]
    assert due == pytest.approx([5.0, 5.02, 5.04, 5.06])


def test_two_rates_decide_the_mix() -> None:
    plan = paced(Budget(None, None), iops=(300.0, 100.0), batch=1)
    directions = [plan.next(0.0).direction for _ in range(400)]  # type: ignore[union-attr]
    assert directions.count(READ) == pytest.approx(300, abs=2)


@settings(deadline=None)
@given(st.sets(st.integers(0, 999), max_size=200), st.integers(1, 64))
def test_written_blocks_come_back_once_in_order(blocks: set[int], batch: int) -> None:
    written = Written(8192, 1000 * 4096, 4096, batch=batch)
    offsets = np.array([8192 + block * 4096 for block in blocks], np.int64)
    written.add(offsets)
    written.add(offsets)
    plan, found = ReadBack(written), []
    while chunk := plan.next(0.0):
        assert chunk.direction == READ
        assert chunk.offsets.size <= batch
        found += chunk.offsets.tolist()
    assert found == sorted(offsets.tolist())


def test_written_over_several_regions_needs_one_grid() -> None:
    written = Written.over([(0, 8192), (1 << 20, 8192)], 4096, batch=4)
    written.add(np.array([(1 << 20) + 4096], np.int64))
    assert [part.tolist() for part in written.chunks()] == [[(1 << 20) + 4096]]
    with pytest.raises(UsageError, match="multiple of bs"):
        Written.over([(0, 8192), (1000, 8192)], 4096, batch=4)


@pytest.mark.parametrize(
    ("members", "bs", "max_io", "commands"),
    [
        ("/a", "1m", [1 << 20], 1),
        ("/a", "4m", [1 << 20], 4),
        ("/a:/b", "64k", [1 << 20] * 2, 1),
        ("/a:/b", "4m", [1 << 20] * 2, 4),
        ("/a:/b", "4m", [128 << 10] * 2, 32),
        ("/a:/b", "64k", [128 << 10] * 2, 1),
        ("/a:/b", "1m", [128 << 10, 1 << 20], 5),
    ],
)
def test_commands_of_a_block(members: str, bs: str, max_io: list[int], commands: int) -> None:
    # The engine's depth is in commands, fio's in blocks: one must be turned into the other.
    settings = [Setting("filename", members, ""), Setting("bs", bs, "")]
    (job,), _ = build_jobs([Section("j", settings)])
    assert session.commands_per_block(job, max_io) == commands
