"""The core is a C library: a program that includes csrc/kvio.h and nothing of Python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import kvio

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def test_c_program(tmp_path: Path, make_files: Callable[..., list[str]]) -> None:
    """Goal: open, register, write, flush, read in three ways, statistics, refusal and close work
    from C, and what C wrote Python reads."""
    members = make_files(2, 2 * MIB)
    program = tmp_path / "c_api"
    sources = [str(path) for path in sorted((ROOT / "csrc").glob("*.c"))]
    flags = ["-std=c11", "-O1", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]
    main = Path(__file__).with_name("c_api.c")
    # static: Debian's shared liburing 2.3 lacks io_uring_enable_rings
    words = [*flags, f"-I{ROOT / 'csrc'}", "-o", str(program), str(main), *sources]
    # not a sanitizer's business: neither the compiler nor this program was built with one
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(["cc", *words, "-l:liburing.a"], check=True, env=env)
    done = subprocess.run([program, *members], capture_output=True, text=True, check=False, env=env)
    assert done.stdout == "ok\n", done.stderr
    with kvio.Volume.open(members, direct="prefer", stripe_unit=64 << 10) as vol:
        got = bytearray(4096)
        assert vol.pread(got, MIB) == 4096
    assert got == bytes((i // 512 * 7 + i) & 255 for i in range(MIB, MIB + 4096))
