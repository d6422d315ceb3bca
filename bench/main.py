"""The main job, what `make bench` runs: reads, then writes, 1 MiB at depth 32 over four members.

As root the members are four loop devices over memory, otherwise four files on the disk that this
repository lies on. MEMBERS="/dev/nvme1n1 /dev/nvme2n1" takes these instead and reads them only;
with --allow-destroy among the arguments it writes to them too, which destroys what they hold.
Both kvio and fio get registered buffers and files. Arguments are passed on to `kvio bench`, after
those given here, so that they win.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kvio
from kvio.testing import LoopDevices

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench-results"
MEMBERS = 4
MIB = 1 << 20
DEPTH = 32


def note(text: str) -> None:
    print(text, file=sys.stderr)


@contextlib.contextmanager
def own_members() -> Iterator[list[str]]:
    """Loop devices where that is possible, else files."""
    try:
        loops = LoopDevices(MEMBERS, member_bytes(memory_free()))
    except OSError as error:
        if os.geteuid() == 0:
            note(f"no loop devices here ({error.strerror or error}), so files are used")
    else:
        with loops:
            note(f"members: {MEMBERS} loop devices over memory")
            yield loops.paths
        return
    with tempfile.TemporaryDirectory(prefix="kvio-bench-", dir=ROOT / "build") as folder:
        note(f"members: {MEMBERS} files in {folder} (as root: loop devices over memory)")
        size_bytes = member_bytes(shutil.disk_usage(folder).free)
        names = [str(Path(folder, f"member-{index}")) for index in range(MEMBERS)]
        yield kvio.Volume.create(names, size_bytes=size_bytes)


def memory_free() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 2 << 30


def member_bytes(free: int) -> int:
    """512 MiB, or less where all members together would take a quarter of what is free."""
    return max(min(512, free // MIB // (MEMBERS * 4)), 64) * MIB


def takes_direct(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def may_register() -> bool:
    """Whether the buffers of one run may be pinned; fio ends with an error where they may not."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # the rings and the other user of the limit take some too
    return os.geteuid() == 0 or soft == resource.RLIM_INFINITY or soft >= 4 * DEPTH * MIB


def command(members: list[str], args: list[str], *, rw: str, plot: Path) -> list[str]:
    options = {
        "filename": ":".join(path.replace(":", "\\:") for path in members),
        "bs": "1M",
        "iodepth": str(DEPTH),
        "runtime": "2",
        "direct": "1" if all(map(takes_direct, members)) else "0",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    words += ["--time_based", "--norandommap", f"--plot={plot}"]
    words += ["--registerfiles", *(["--fixedbufs"] if may_register() else [])]
    if shutil.which("fio"):
        words += ["--compare-fio", "--pairs=3"]
    return [sys.executable, "-m", "kvio", "bench", *words, *args, f"--name={rw}", f"--rw={rw}"]


def main(args: list[str]) -> int:
    given = os.environ.get("MEMBERS", "").split()
    RESULTS.mkdir(exist_ok=True)
    (ROOT / "build").mkdir(exist_ok=True)
    if not shutil.which("fio"):
        note("fio is not installed, so there is nothing beside kvio's figures: apt-get install fio")
    if not may_register():
        note(
            "RLIMIT_MEMLOCK is too low for registered buffers (ulimit -l), so neither side has them"
        )
    with contextlib.nullcontext(given) if given else own_members() as members:
        write = not given or "--allow-destroy" in args
        if given and not write:
            note("members given: reading only (ARGS=--allow-destroy writes, and destroys)")
        for rw in ["randread", "randwrite"] if write else ["randread"]:
            plot = RESULTS / f"main-{rw}.png"
            plot.unlink(missing_ok=True)
            words = command(members, args, rw=rw, plot=plot)
            done = subprocess.run(words, cwd=ROOT, check=False).returncode
            if done:
                return done
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as failure:
        sys.exit(f"make bench: {failure}")
