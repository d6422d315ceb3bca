# SPDX-License-Identifier: Apache-2.0
"""Builds kvio's two compiled modules: kvio._core (Cython over csrc/) and kvio.uring (cffi).

Both carry their own copy of liburing, taken from the distribution's static library, and export
nothing but their PyInit symbol: two extensions in one process must not find each other's ring.

Environment:
    KVIO_SANITIZE=address,undefined   build under these gcc sanitizers (see `make sanitize`)
    KVIO_DEBUG=1                      KVIO_DEBUG_ASSERT, and -O0 without a sanitizer
    CC, CFLAGS, LDFLAGS               as everywhere
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SANITIZE = os.environ.get("KVIO_SANITIZE", "")
DEBUG = os.environ.get("KVIO_DEBUG", "") not in ("", "0")

# Ours is C11 with every warning; what Cython and cffi generate is theirs to answer for.
OUR_FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes"]
GENERATED_FLAGS = ["-w"]

MISSING_LIBURING = """
kvio needs liburing's {what} to build, and this compiler does not find it.
    Debian, Ubuntu:         apt-get install liburing-dev
    Fedora, RHEL, Rocky:    dnf install liburing-devel
"""


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def try_compile(source: str, *args: str) -> bool:
    """True when the C text compiles, and links unless args hold -E or -c."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "probe.c")
        path.write_text(source)
        flags = shlex.split(os.environ.get("CFLAGS", "")) + shlex.split(
            os.environ.get("LDFLAGS", "")
        )
        command = [*compiler(), str(path), *flags, *args, "-o", str(Path(folder, "probe"))]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            sys.exit(f"kvio needs a C compiler, and {command[0]!r} is not there: install gcc")
        return done.returncode == 0


def find_static_liburing() -> str | None:
    """The full path of a liburing.a that may go into a shared object, or None."""
    printed = subprocess.run(
        [*compiler(), "-print-file-name=liburing.a"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # gcc prints the bare name back when it has found nothing
    if not os.path.isabs(printed) or not os.path.exists(printed):
        return None
    probe = "#include <liburing.h>\nint f(struct io_uring *r) { return io_uring_submit(r); }\n"
    # an archive without position-independent code is there but of no use
    return printed if try_compile(probe, "-shared", "-fPIC", printed) else None


def liburing_link_args() -> list[str]:
    """How to link liburing; exits with the packages' names when that is not possible."""
    if not try_compile("#include <liburing.h>\nint x;\n", "-E"):
        sys.exit(MISSING_LIBURING.format(what="header (liburing.h)"))
    static = find_static_liburing()
    if static:
        return [static, "-Wl,--exclude-libs,ALL"]
    probe = "#include <liburing.h>\nint main(void) { return io_uring_queue_init(1, 0, 0); }\n"
    if try_compile(probe, "-luring"):
        print(
            "note: no usable static liburing.a; linking the shared liburing, which must then be"
            " present wherever kvio runs",
            file=sys.stderr,
        )
        return ["-luring"]
    sys.exit(MISSING_LIBURING.format(what="library (liburing.a)"))


def is_generated(source: str) -> bool:
    return not os.path.relpath(os.path.abspath(source), ROOT).startswith("csrc" + os.sep)


def newest(paths: list[str]) -> float:
    return max((os.path.getmtime(path) for path in paths), default=0.0)


class BuildExt(build_ext):
    """Adds liburing and the version script to every extension, and warnings to our C alone."""

    def finalize_options(self) -> None:
        super().finalize_options()
        mode = "-".join(filter(None, [SANITIZE.replace(",", "-"), "debug" if DEBUG else ""]))
        if mode and not self.build_temp.endswith(mode):
            self.build_temp = f"{self.build_temp}-{mode}"  # never mix objects of two kinds

    def build_extensions(self) -> None:
        if self.editable_mode:
            # setuptools would take a new temporary folder; here the objects are found again
            self.build_temp = f"build/temp.{self.plat_name}-{sys.implementation.cache_tag}"
        self._link_args = liburing_link_args()
        self._wrap_compile()
        super().build_extensions()

    def _wrap_compile(self) -> None:
        """Per-file flags, files in parallel, and none compiled again that is up to date."""
        headers = newest([*glob(str(ROOT / "csrc" / "*.h")), __file__])
        single = self.compiler._compile

        def compile_one(obj, src, ext, cc_args, postargs, pp_opts):
            fresh = max(headers, os.path.getmtime(src))
            if not self.force and os.path.exists(obj) and os.path.getmtime(obj) > fresh:
                return
            extra = GENERATED_FLAGS if is_generated(src) else OUR_FLAGS
            single(obj, src, ext, cc_args, [*postargs, *extra], pp_opts)

        # fmt: off
        def compile_all(sources, output_dir=None, macros=None,
                        include_dirs=None, debug=0,
                        extra_preargs=None, extra_postargs=None, depends=None):
            # fmt: on
            compiler = self.compiler
            macros, objects, postargs, pp_opts, build = compiler._setup_compile(
                output_dir, macros, include_dirs, sources, depends, extra_postargs
            )
            cc_args = compiler._get_cc_args(pp_opts, debug, extra_preargs)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                jobs = [
                    pool.submit(compile_one, obj, *build[obj], cc_args, postargs, pp_opts)
                    for obj in objects
                ]
                for job in jobs:
                    job.result()
            return objects

        self.compiler.compile = compile_all

    def build_extension(self, ext: Extension) -> None:
        short = ext.name.rpartition(".")[2]
        script = Path(self.build_temp, f"{short}.map")
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"{{ global: PyInit_{short}; local: *; }};\n")
        ext.extra_link_args = [
            *[arg for arg in ext.extra_link_args if arg != "-luring"],
            *self._link_args,
            f"-Wl,--version-script={script}",
        ]
        ext.libraries = [name for name in ext.libraries if name != "uring"]
        ext.extra_compile_args = [*ext.extra_compile_args, *mode_flags()]
        ext.extra_link_args += [f"-fsanitize={SANITIZE}"] if SANITIZE else []
        super().build_extension(ext)


def mode_flags() -> list[str]:
    flags = ["-g", "-fvisibility=hidden", "-D_GNU_SOURCE"]
    flags += ["-DKVIO_DEBUG=1"] if DEBUG else []
    if SANITIZE:
        # a finding must end the test run, not scroll past in it
        return [*flags, "-O1", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}",
                "-fno-sanitize-recover=all"]  # fmt: skip
    return [*flags, "-O0" if DEBUG else "-O2"]


def core_extension() -> Extension:
    import numpy

    return Extension(
        "kvio._core",
        sources=["kvio/_core.pyx", *sorted(glob("csrc/*.c"))],
        depends=sorted(glob("csrc/*.h") + glob("kvio/*.pxd") + glob("kvio/*.pxi")),
        include_dirs=["csrc", numpy.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        extra_compile_args=["-pthread"],
        extra_link_args=["-pthread"],
    )


def extensions() -> list[Extension]:
    from Cython.Build import cythonize

    return cythonize(
        [core_extension()],
        build_dir="build/cython",
        compiler_directives={"language_level": 3, "binding": True},
    )


if __name__ == "__main__":
    os.chdir(ROOT)
    setup(
        ext_modules=extensions(),
        cffi_modules=["kvio/uring/_build.py:ffibuilder"],
        cmdclass={"build_ext": BuildExt},
    )
