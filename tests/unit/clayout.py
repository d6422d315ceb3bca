"""csrc/layout.c as a library of its own, for the tests: compiled with UBSan, driven by ctypes.

The package exports nothing of it. A shim gives plain numbers, so no struct is declared twice.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
UNUSED = 2**64 - 1

SHIM = """
#include <stdlib.h>
#include "layout.h"

int t_init(struct kvio_layout **out, const uint64_t *sizes, uint32_t n, uint64_t unit)
{
  *out = calloc(1, sizeof(**out));
  return kvio_layout_init(*out, sizes, n, unit);
}
void t_free(struct kvio_layout *layout)
{
  kvio_layout_free(layout);
  free(layout);
}
uint64_t t_size(const struct kvio_layout *layout) { return layout->size_bytes; }
uint32_t t_zones(const struct kvio_layout *layout) { return layout->n_zones; }
uint32_t t_width(const struct kvio_layout *layout, uint64_t offset)
{
  return kvio_layout_zone(layout, offset)->n;
}
void t_map(const struct kvio_layout *layout, uint64_t offset, uint64_t max, uint64_t *out)
{
  struct kvio_piece piece = kvio_layout_map(layout, offset, max);
  out[0] = piece.member;
  out[1] = piece.offset;
  out[2] = piece.length;
}
uint64_t t_unmap(const struct kvio_layout *layout, uint32_t member, uint64_t offset)
{
  return kvio_layout_unmap(layout, member, offset);
}
"""


@functools.cache
def library(mutation: tuple[str, str] | None = None) -> ctypes.CDLL:
    """The compiled library; ``mutation`` (old, new) changes layout.c first, for tests of tests."""
    source = (CSRC / "layout.c").read_text()
    if mutation is not None:
        assert source.count(mutation[0]) == 1, f"layout.c has changed: no {mutation[0]!r}"
        source = source.replace(*mutation)
    with tempfile.TemporaryDirectory(prefix="kvio-layout-") as scratch:
        Path(scratch, "layout.c").write_text(source)
        Path(scratch, "shim.c").write_text(SHIM)
        built = Path(scratch, "layout.so")
        command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared",
                   "-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{CSRC}", "-o", built,
                   f"{scratch}/layout.c", f"{scratch}/shim.c", CSRC / "base.c"]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        lib = ctypes.CDLL(str(built))
    pointer, u64, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    lib.t_init.argtypes = [ctypes.POINTER(pointer), ctypes.POINTER(u64), u32, u64]
    for name, result, args in (
        ("t_free", None, []),
        ("t_size", u64, []),
        ("t_zones", u32, []),
        ("t_width", u32, [u64]),
        ("t_map", None, [u64, u64, ctypes.POINTER(u64)]),
        ("t_unmap", u64, [u32, u64]),
    ):
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = [pointer, *args]
    return lib


class Layout:
    """One layout. Raises OSError with the errno that kvio_layout_init() returned."""

    def __init__(
        self, sizes: Sequence[int], unit: int, mutation: tuple[str, str] | None = None
    ) -> None:
        self._lib = library(mutation)
        self._layout = ctypes.c_void_p()
        array = (ctypes.c_uint64 * max(len(sizes), 1))(*sizes)
        code = self._lib.t_init(self._layout, array, len(sizes), unit)
        if code:
            self._lib.t_free(self._layout)
            self._layout = ctypes.c_void_p()
            raise OSError(-code, f"layout of {len(sizes)} members refused")
        self.size = self._lib.t_size(self._layout)
        self.zones = self._lib.t_zones(self._layout)

    def width(self, offset: int) -> int:
        """Members that the zone of an address stripes over."""
        return int(self._lib.t_width(self._layout, offset))

    def map(self, offset: int, max_length: int = 2**62) -> tuple[int, int, int]:
        """(member, offset on it, length)."""
        out = (ctypes.c_uint64 * 3)()
        self._lib.t_map(self._layout, offset, max_length, out)
        return out[0], out[1], out[2]

    def unmap(self, member: int, offset: int) -> int:
        """The address, or UNUSED."""
        return int(self._lib.t_unmap(self._layout, member, offset))

    def __del__(self) -> None:
        if self._layout:
            self._lib.t_free(self._layout)
