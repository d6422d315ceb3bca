"""Stripe arithmetic: every byte of the volume lies on exactly one byte of one member.

Method: csrc/layout.c against a model that lists stripe units in order, over members of any number
and size (Hypothesis), and at the far ends of 64-bit numbers. Mutants of layout.c show that the
checks can fail.
"""

from __future__ import annotations

import errno
import faulthandler
import multiprocessing
import os
import resource

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.clayout import UNUSED, Layout

UNITS = st.sampled_from([512, 1024, 4096])
MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40


@st.composite
def volumes(draw: st.DrawFn) -> tuple[list[int], int]:
    """Sizes of 1 to 12 members and a stripe unit; sizes repeat often, and need not be multiples."""
    unit = draw(UNITS)
    whole = st.integers(1, 24).map(lambda n: n * unit)
    ragged = st.integers(unit, 24 * unit)
    sizes = draw(st.lists(whole | ragged, min_size=1, max_size=12))
    return sizes, unit


def usable(sizes: list[int], unit: int) -> list[int]:
    return sizes if len(sizes) == 1 else [size // unit * unit for size in sizes]


def units_in_order(sizes: list[int], unit: int) -> list[tuple[int, int]]:
    """The model: (member, offset) of stripe unit 0, 1, 2, ...: row by row, who has room."""
    room = usable(sizes, unit)
    rows = -(-max(room) // unit)
    return [
        (m, row * unit) for row in range(rows) for m in range(len(room)) if room[m] > row * unit
    ]


def check_against_model(layout: Layout, sizes: list[int], unit: int) -> None:
    room = usable(sizes, unit)
    assert layout.size == sum(room)
    taken: list[list[tuple[int, int]]] = [[] for _ in sizes]
    model = units_in_order(sizes, unit)
    address = 0
    while address < layout.size:
        member, offset, length = layout.map(address)
        assert length > 0
        in_unit = address % unit
        expected_member, expected_offset = model[address // unit]
        assert (member, offset) == (expected_member, expected_offset + in_unit)
        taken[member].append((offset, offset + length))
        for probe in {0, length // 2, length - 1}:
            assert layout.unmap(member, offset + probe) == address + probe
            assert layout.map(address + probe) == (member, offset + probe, length - probe)
        if layout.width(address) > 1:
            assert length == unit - in_unit
        address += length
    assert address == layout.size
    for member, extents in enumerate(taken):
        end = 0
        for start, stop in sorted(extents):
            assert start == end, f"member {member}: gap or overlap at {start}"
            end = stop
        assert end == room[member], f"member {member}: {end} bytes used of {room[member]}"
        assert layout.unmap(member, room[member]) == UNUSED
    assert layout.unmap(len(sizes), 0) == UNUSED


@settings(max_examples=200, deadline=None)
@given(volumes())
@example(([512], 512))
@example(([10_000], 4096))
@example(([4096, 12288, 4096, 8192], 4096))
def test_every_byte_lies_on_exactly_one_byte_of_one_member(volume: tuple[list[int], int]) -> None:
    sizes, unit = volume
    check_against_model(Layout(sizes, unit), sizes, unit)


@settings(max_examples=200, deadline=None)
@given(volumes(), st.data())
def test_piece_ends_at_what_was_asked_for_or_at_the_unit(
    volume: tuple[list[int], int], data: st.DataObject
) -> None:
    layout = Layout(*volume)
    offset = data.draw(st.integers(0, layout.size - 1))
    asked = data.draw(st.integers(1, 2 * layout.size))
    member, at, length = layout.map(offset, asked)
    assert 0 < length <= asked
    assert offset + length <= layout.size
    assert (member, at) == layout.map(offset)[:2]
    if length < asked and layout.width(offset) > 1:
        assert (offset + length) % volume[1] == 0
    for probe in {0, length - 1}:  # a piece is contiguous on its member
        assert layout.map(offset + probe, 1) == (member, at + probe, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 256), st.integers(1, 40), st.data())
def test_any_number_of_members(n: int, rows: int, data: st.DataObject) -> None:
    layout = Layout([rows * 512] * n, 512)
    assert layout.zones == 1
    unit = data.draw(st.integers(0, n * rows - 1))
    in_unit = data.draw(st.integers(0, 511))
    member, offset, _ = layout.map(unit * 512 + in_unit)
    assert (member, offset) == (unit % n, unit // n * 512 + in_unit)
    assert layout.unmap(member, offset) == unit * 512 + in_unit


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2**20), min_size=2, max_size=256), st.sampled_from([MIB, GIB]))
def test_numbers_of_real_devices_do_not_overflow(counts: list[int], unit: int) -> None:
    """Up to 256 members of up to 1 PiB: the inverse holds at both ends of every zone."""
    sizes = [count * unit for count in counts]
    if sum(sizes) > 2**63 - 1:
        with pytest.raises(OSError) as refused:
            Layout(sizes, unit)
        assert refused.value.errno == errno.EFBIG
        return
    layout = Layout(sizes, unit)
    assert layout.size == sum(sizes)
    rows = sorted(set(counts))
    for row in {0, *(r - 1 for r in rows), *(r for r in rows[:-1])}:
        members = [m for m, count in enumerate(counts) if count > row]
        start = sum(min(count, row) for count in counts) * unit
        for position in {0, len(members) - 1}:
            address = start + position * unit
            assert layout.map(address)[:2] == (members[position], row * unit)
            assert layout.unmap(members[position], row * unit) == address
            last = address + unit - 1
            assert layout.map(last) == (members[position], row * unit + unit - 1, 1) or (
                layout.width(last) == 1
            )


def test_largest_volume_is_2_63_minus_1_bytes() -> None:
    assert Layout([2**63 - 1], 512).map(2**63 - 2)[:2] == (0, 2**63 - 2)
    with pytest.raises(OSError) as refused:
        Layout([2**63], 512)
    assert refused.value.errno == errno.EFBIG
    with pytest.raises(OSError) as refused:
        Layout([2**62, 2**62], 1 << 40)
    assert refused.value.errno == errno.EFBIG


@pytest.mark.parametrize(
    ("sizes", "unit", "code"),
    [
        ([], 4096, errno.EINVAL),
        ([4096] * 257, 4096, errno.EINVAL),
        ([8192], 0, errno.EINVAL),
        ([8192], 4095, errno.EINVAL),
        ([8192], 3 * 4096, errno.EINVAL),
        ([0], 4096, errno.ENOSPC),
        ([8192, 4095], 4096, errno.ENOSPC),
        ([8192, 0], 4096, errno.ENOSPC),
    ],
)
def test_bad_geometry_is_refused(sizes: list[int], unit: int, code: int) -> None:
    with pytest.raises(OSError) as refused:
        Layout(sizes, unit)
    assert refused.value.errno == code


def test_lone_member_is_used_to_its_last_byte() -> None:
    layout = Layout([10_000], 4096)
    assert layout.size == 10_000
    assert layout.map(8192) == (0, 8192, 1808)
    assert layout.map(0) == (0, 0, 10_000)


MUTANTS = [
    ("(row << layout->unit_shift) + in_unit;", "(row << layout->unit_shift);"),
    ("zone->member_start + (row << layout", "(row << layout"),
    ("zone->members[unit - row * zone->n]", "zone->members[0]"),
    ("if (usable[i] <= from)", "if (usable[i] < from)"),
    ("layout->stripe_unit - in_unit);", "layout->stripe_unit);"),
    ("(((row * zone->n) + i) << layout", "((row * zone->n) << layout"),
    ("to = kvio_min_u64(to, usable[i]);", "to = usable[i];"),
    ("n_members == 1 ? sizes[i] : kvio_align_down(sizes[i], stripe_unit)", "sizes[i]"),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTANTS, ids=[old[:24] for old, _ in MUTANTS])
def test_checks_catch_a_wrong_layout(mutation: tuple[str, str]) -> None:
    """Goal: the model check above is not vacuous. Method: compile a wrong layout.c, expect failure.

    In children, since a wrong layout may also trip the C code's own assertion.
    """
    process = multiprocessing.get_context("fork").Process(target=_run_mutant, args=(mutation,))
    process.start()
    process.join(60)
    assert process.exitcode != 0, "the mutant passed every check"


def _run_mutant(mutation: tuple[str, str]) -> None:
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for sizes in ([4096, 12288, 4096, 8192], [12288, 12288], [8192, 20480, 20480, 9000], [10_000]):
        check_against_model(Layout(sizes, 4096, mutation), sizes, 4096)
