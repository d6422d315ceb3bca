"""NVMe commands as bytes, completion statuses as errno, Identify Namespace.

Method: the bytes are unpacked again by their offsets in the NVMe specification, the statuses are
compared with the block layer's own table (written out here a second time), structures are made up.
"""

from __future__ import annotations

import errno
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cdevice import core


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    core()  # not within the time that one example may take


def command(
    offset: int, length: int, *, write: bool = False, nsid: int = 1, shift: int = 12, addr: int = 0
) -> bytes:
    module = core()
    assert module.lib.t_nvme_cmd_bytes == 72
    cmd = module.ffi.new("uint8_t[72]", b"\xff" * 72)
    module.lib.t_nvme_rw(cmd, write, nsid, shift, offset, length, addr)
    return bytes(module.ffi.buffer(cmd))


@given(
    write=st.booleans(),
    nsid=st.integers(1, 2**32 - 1),
    shift=st.integers(9, 16),
    block=st.integers(0, 2**47),
    blocks=st.integers(1, 65536),
    addr=st.integers(0, 2**64 - 1),
)
def test_command_addresses_exactly_the_blocks_asked_for(
    *, write: bool, nsid: int, shift: int, block: int, blocks: int, addr: int
) -> None:
    if blocks << shift >= 2**32:
        blocks = (2**32 - 1) >> shift
    raw = command(block << shift, blocks << shift, write=write, nsid=nsid, shift=shift, addr=addr)
    opcode, flags, _, got_nsid, cdw2, cdw3 = struct.unpack_from("<BBHIII", raw, 0)
    metadata, got_addr, metadata_len, data_len = struct.unpack_from("<QQII", raw, 16)
    slba, control = struct.unpack_from("<QI", raw, 40)
    assert (opcode, flags, got_nsid) == (1 if write else 2, 0, nsid)
    assert (got_addr, data_len) == (addr, blocks << shift)
    assert (slba, control) == (block, blocks - 1)
    assert (cdw2, cdw3, metadata, metadata_len) == (0, 0, 0, 0)
    assert raw[52:] == bytes(20), "no hints, no protection, the default timeout"


# drivers/nvme/host/core.c nvme_error_status() and block/blk-core.c blk_errors[]
BLOCK_LAYER = {
    0x01: errno.EOPNOTSUPP, 0x02: errno.EOPNOTSUPP, 0x0B: errno.EOPNOTSUPP,
    0x21: errno.EREMOTEIO, 0x80: errno.EREMOTEIO, 0x81: errno.ENOSPC, 0x82: errno.EREMOTEIO,
    0x83: errno.EBADE,
    0x180: errno.EOPNOTSUPP, 0x181: errno.EILSEQ, 0x182: errno.ENODATA,
    0x1BD: errno.EOVERFLOW, 0x1BE: errno.ETOOMANYREFS,
    0x280: errno.ENODATA, 0x281: errno.ENODATA, 0x282: errno.EILSEQ, 0x283: errno.EILSEQ,
    0x284: errno.EILSEQ, 0x285: errno.ENODATA, 0x286: errno.ENODATA, 0x287: errno.ENODATA,
    0x370: errno.ENOLINK,
}  # fmt: skip


@pytest.mark.parametrize("status", BLOCK_LAYER, ids=hex)
@pytest.mark.parametrize("hints", [0, 0x4000, 0x2000, 0x1800, 0x7800], ids=hex)
def test_status_becomes_the_errno_of_the_block_layer(status: int, hints: int) -> None:
    lib = core().lib
    assert lib.kvio_nvme_result(status | hints, 4096) == -BLOCK_LAYER[status]


@given(st.integers(1, 0x7FFF))
def test_no_status_is_ever_taken_for_success(status: int) -> None:
    lib = core().lib
    assert lib.kvio_nvme_result(status, 4096) < 0


@given(st.integers(0x300, 0x3FF))
def test_every_path_error_is_a_broken_link(status: int) -> None:
    assert core().lib.kvio_nvme_status_errno(status) == -errno.ENOLINK


def test_result_of_success_is_the_length_and_of_the_kernel_its_errno() -> None:
    lib = core().lib
    assert lib.kvio_nvme_result(0, 65536) == 65536
    for code in (errno.EINTR, errno.EAGAIN, errno.ENODEV, errno.ENOMEM):
        assert lib.kvio_nvme_result(-code, 65536) == -code
    assert core().ffi.string(lib.kvio_nvme_status_text(0x4281)) == b"unrecovered read error"


def test_head_without_a_live_path_is_a_broken_link_not_a_wrong_call() -> None:
    """The kernel says EINVAL then, which for the caller would mean a mistake of its own."""
    assert core().lib.kvio_nvme_result(-errno.EINVAL, 65536) == -errno.ENOLINK


@pytest.mark.parametrize(
    ("max_kb", "segments", "shift", "expected"),
    [
        (128, 33, 12, 128 << 10),
        (2048, 127, 12, 256 << 10),  # 127 pages are 508 KiB; a power of two
        (1 << 40, 1 << 40, 12, 1 << 20),
        (4, 128, 12, 4096),  # small and true: a larger command is refused, not split
        (0, 0, 12, 128 << 10),
        (0, 8, 9, 32 << 10),
    ],
)
def test_command_size_is_what_one_command_may_carry(
    max_kb: int, segments: int, shift: int, expected: int
) -> None:
    assert core().lib.kvio_nvme_max_bytes(max_kb, segments, shift) == expected


def identify(**fields: int) -> tuple[int, object]:
    """kvio_nvme_parse_namespace on a structure with these fields."""
    module = core()
    raw = bytearray(os.urandom(4096))
    blocks, formats, current = fields["blocks"], fields.get("formats", 1), fields.get("format", 0)
    struct.pack_into("<Q", raw, 0, blocks)
    raw[25] = formats - 1
    raw[26] = current & 0xF | (current >> 4) << 5
    raw[30] = fields.get("shared", 0)
    lbaf = 128 + 4 * current
    struct.pack_into("<HBB", raw, lbaf, fields.get("metadata", 0), fields.get("shift", 12), 0)
    ns = module.ffi.new("struct kvio_nvme_namespace *")
    return module.lib.t_nvme_parse(ns, module.ffi.from_buffer("uint8_t[]", raw)), ns


@pytest.mark.parametrize(("formats", "current"), [(1, 0), (16, 15), (64, 63), (64, 16)])
@pytest.mark.parametrize("shift", [9, 12, 16])
def test_namespace_is_read_by_its_current_format(formats: int, current: int, shift: int) -> None:
    rc, ns = identify(
        blocks=1000, formats=formats, format=current, shift=shift, metadata=8, shared=1
    )
    assert rc == 0
    assert ns.size_bytes == 1000 << shift  # type: ignore[attr-defined]
    assert ns.lba_shift == shift  # type: ignore[attr-defined]
    assert ns.metadata_bytes == 8  # type: ignore[attr-defined]
    assert ns.shared  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields", [{"blocks": 0}, {"blocks": 1, "shift": 0}, {"blocks": 1, "shift": 40},
               {"blocks": 2**63, "shift": 12}], ids=str
)  # fmt: skip
def test_namespace_that_makes_no_sense_is_refused(fields: dict[str, int]) -> None:
    assert identify(**fields)[0] == -errno.EINVAL
