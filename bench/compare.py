"""kvio beside what a Python program would use today to read KV-cache pages.

    python bench/compare.py                         a file of its own, 512 MiB on this disk
    python bench/compare.py --file PATH             a file or device of yours; it is only read
    python bench/compare.py --peers-python PYTHON   peers installed in another environment

The optional peers: pip install liburing==2024.5.3 kvikio-cu12 nixl-cu12 (NIXL needs no GPU). Each
that is missing, or that fails, is left out with its reason. All of them read with O_DIRECT, at
random, in turns, into the same kind of memory; the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from bench.peers import PEERS

SHAPES = ("one at a time", "16 requesters", "batches of 16")
FILE_BYTES = 512 << 20
_UNITS = {"k": 1 << 10, "m": 1 << 20}


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians of one peer at one page size and shape, or why there are none."""

    peer: str
    page_bytes: int
    shape: str
    gbps: float = 0.0
    cpu_per_gb: float = 0.0
    p99_us: float = 0.0
    skip: str = ""


class Worker:
    """A peer in a process of its own, so that CPU time is its alone."""

    def __init__(self, name: str, path: str, python: str) -> None:
        self.name = name
        script = str(Path(__file__).with_name("peer_worker.py"))
        self._process = subprocess.Popen(
            [sys.executable if name == "kvio" else python, script, name, path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def measure(self, **request: Any) -> dict[str, Any]:
        pipe, answers = self._process.stdin, self._process.stdout
        assert pipe is not None
        assert answers is not None
        try:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
            for line in answers:  # a peer's library may print lines of its own
                if line.startswith("{") and ('"gbps"' in line or '"skip"' in line):
                    return json.loads(line)
        except BrokenPipeError:
            pass
        code = self._process.wait()
        return {"skip": f"its process ended: {signal.strsignal(-code) if code < 0 else code}"}

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def stamped_file(folder: str | None) -> Iterator[str]:
    """A written file in which each 4 KiB begins with its number."""
    import numpy as np

    with tempfile.NamedTemporaryFile(dir=folder or os.getcwd(), prefix="kvio-compare-") as file:
        part = 64 << 20
        words = np.random.default_rng(5).integers(0, 2**63, part // 8, dtype=np.uint64)
        for start in range(0, FILE_BYTES, part):
            words.reshape(-1, 512)[:, 0] = np.arange(start // 4096, (start + part) // 4096)
            file.write(words.data)
        file.flush()
        os.fsync(file.fileno())
        yield file.name


def run(
    path: str, names: list[str], pages: list[int], args: argparse.Namespace, console: Console
) -> list[Row]:
    """All peers in turns, so that a machine's moods meet them all."""
    workers = [Worker(name, path, args.peers_python) for name in names]
    rows = []
    seed = 0
    try:
        for page in pages:
            for shape in SHAPES:
                got: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
                skipped: dict[str, str] = {}
                for _ in range(args.rounds):
                    for worker in workers:
                        if worker.name in skipped:
                            continue
                        seed += 1
                        answer = worker.measure(
                            page=page, shape=shape, seconds=args.seconds, seed=seed,
                            verify=args.file is None,
                        )  # fmt: skip
                        if "skip" in answer:
                            skipped[worker.name] = answer["skip"]
                        else:
                            got[worker.name].append(answer)
                rows += [summary(name, page, shape, got[name], skipped) for name in names]
                console.print(table(rows[-len(names) :], page, shape))
    finally:
        for worker in workers:
            worker.close()
    return rows


def summary(
    name: str, page: int, shape: str, runs: list[dict[str, Any]], skipped: dict[str, str]
) -> Row:
    if name in skipped:
        return Row(name, page, shape, skip=skipped[name])

    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    return Row(name, page, shape, median("gbps"), median("cpu_per_gb"), median("p99_us"))


def size_words(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def table(rows: list[Row], page: int, shape: str) -> Table:
    out = Table(title=f"{size_words(page)} pages, {shape}", title_justify="left")
    out.add_column("peer")
    for column in ("GB/s", "CPU s/GB", "p99 of a call, us"):
        out.add_column(column, justify="right")
    best = max((row.gbps for row in rows), default=0.0)
    for row in rows:
        if row.skip:
            out.add_row(row.peer, "-", "-", "-")
            continue
        text = f"{row.gbps:.2f}"
        out.add_row(
            row.peer,
            f"[bold]{text}[/bold]" if row.gbps == best else text,
            f"{row.cpu_per_gb:.3f}",
            f"{row.p99_us:.0f}",
        )
    return out


def plot(rows: list[Row], path: str) -> None:
    """Bars: bandwidth above, CPU below, for each page size and shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = [row for row in rows if not row.skip]
    names = list(dict.fromkeys(row.peer for row in measured))
    groups = list(dict.fromkeys((row.page_bytes, row.shape) for row in measured))
    figure, axes = plt.subplots(2, 1, figsize=(12, 8), sharex=True)
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        own = {(row.page_bytes, row.shape): row for row in measured if row.peer == name}
        at = [g + i * width for g, group in enumerate(groups) if group in own]
        found = [own[group] for group in groups if group in own]
        axes[0].bar(at, [row.gbps for row in found], width, label=name)
        axes[1].bar(at, [row.cpu_per_gb for row in found], width)
    axes[0].set_ylabel("GB/s")
    axes[1].set_ylabel("CPU seconds per GB")
    axes[1].set_xticks([g + 0.4 - width / 2 for g in range(len(groups))])
    axes[1].set_xticklabels([f"{size_words(page)}\n{shape}" for page, shape in groups])
    axes[0].legend(ncols=4, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))
    for axis in axes:
        axis.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def parse_size(text: str) -> int:
    word = text.strip().lower()
    try:
        size = int(word[:-1]) * _UNITS[word[-1]] if word[-1:] in _UNITS else int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 256k, 2m, 4096") from None
    if size <= 0 or size % 4096 or size > 2 << 20:
        raise argparse.ArgumentTypeError(f"{text!r}: a multiple of 4096, at most 2m")
    return size


def parse_pages(text: str) -> list[int]:
    return [parse_size(word) for word in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", help="file or block device to read (it is never written)")
    parser.add_argument("--dir", help="folder for the file that is made otherwise")
    parser.add_argument("--pages", type=parse_pages, default="256k,2m", help="default 256k,2m")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each run (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each peer (default 5)")
    parser.add_argument("--peers", default=",".join(PEERS), help="names, separated by commas")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter of the peers")
    parser.add_argument("--output", help="write all figures as JSON")
    parser.add_argument("--plot", help="write a plot (png, svg, pdf)")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.peers.split(",")]
    unknown = [name for name in names if name not in PEERS]
    if unknown or args.rounds < 1 or args.seconds <= 0:
        parser.error(
            f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}" if unknown
            else "--rounds and --seconds must be positive"
        )  # fmt: skip
    if args.file and not os.access(args.file, os.R_OK):
        parser.error(f"{args.file}: no such file, or it cannot be read")
    console = Console()
    if args.file:
        rows = run(args.file, names, args.pages, args, console)
    else:
        with stamped_file(args.dir) as path:
            rows = run(path, names, args.pages, args, console)
    for reason in dict.fromkeys(f"{row.peer}: {row.skip}" for row in rows if row.skip):
        console.print(f"left out: {reason}", markup=False, soft_wrap=True)
    if args.output:
        Path(args.output).write_text(
            json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n"
        )
    if args.plot:
        plot(rows, args.plot)
        console.print(f"plot: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
