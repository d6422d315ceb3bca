"""``kvio tune``: try block sizes and depths on the members and recommend a pair."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvio.cli import units
from kvio.cli.common import (
    EXIT_INTERRUPTED,
    EXIT_IO_ERROR,
    EXIT_OK,
    EXIT_USAGE,
    BenchError,
    UsageError,
    format_count,
    format_ns,
    format_rate,
    format_size,
    table,
    warn,
)
from kvio.cli.jobfile import Section, Setting
from kvio.cli.jobs import Job
from kvio.cli.jobspec import build_jobs
from kvio.cli.results import merge_results

# A point within this share of the best bandwidth is as good; noise between runs is larger.
_AS_GOOD = 0.97
_MAX_POINTS = 400


@dataclass(frozen=True, slots=True)
class Point:
    """One measured combination."""

    engine: str
    block_bytes: int
    iodepth: int
    bw_bytes: float
    iops: float
    p50_ns: int
    p99_ns: int
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The chosen combination and why."""

    point: Point
    reason: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tune`` to the command line."""
    parser = subparsers.add_parser(
        "tune",
        help="find the block size and depth that the members need",
        description="Sweep block size x depth (x engine) over the members and recommend.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "members",
        nargs="+",
        metavar="member",
        help="devices or files; a:b is split unless a file has that name",
    )
    parser.add_argument(
        "--rw", default="randread", help="read, randread, write or randwrite (default randread)"
    )
    parser.add_argument(
        "--bs", default="64k,256k,1m,4m", help="block sizes (default 64k,256k,1m,4m)"
    )
    parser.add_argument("--iodepth", default="1,4,16,32,64", help="depths (default 1,4,16,32,64)")
    parser.add_argument(
        "--engine", default="auto", help="engines: auto,io_uring,threads (default auto)"
    )
    parser.add_argument("--runtime", default="2s", help="time for each combination (default 2s)")
    parser.add_argument(
        "--ramp-time", "--ramp_time", default="0", help="time before counting (default 0)"
    )
    parser.add_argument("--size", help="bytes of the volume to work on (default all)")
    parser.add_argument(
        "--stripe-unit", "--stripe_unit", default="1m", help="stripe unit (default 1m)"
    )
    parser.add_argument(
        "--direct", choices=("0", "1"), help="1: O_DIRECT or nothing; 0: page cache"
    )
    parser.add_argument("--fixedbufs", action="store_true", help="registered buffers from a pool")
    parser.add_argument(
        "--allow-destroy", "--allow_destroy", action="store_true", help="write to members with data"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--plot", help="draw the sweep: OUT.png, OUT.svg or OUT.html")


def build_sweep(args: argparse.Namespace) -> list[Job]:
    """The job of every combination, engines outermost, depths innermost.

    Raises
    ------
    UsageError
        A list is empty or wrong, or the sweep would be too large.
    """
    if args.rw not in ("read", "write", "randread", "randwrite"):
        raise UsageError(f"rw={args.rw} is not one of read, write, randread, randwrite")
    sizes = sorted({units.parse_size(part) for part in _split("bs", args.bs)})
    depths = sorted({units.parse_int(part) for part in _split("iodepth", args.iodepth)})
    engines = list(dict.fromkeys(_split("engine", args.engine)))
    if len(sizes) * len(depths) * len(engines) > _MAX_POINTS:
        raise UsageError(
            f"{len(sizes) * len(depths) * len(engines)} combinations are more than {_MAX_POINTS}"
        )
    shared = {
        "filename": units.join_escaped(args.members, ":"),
        "rw": args.rw,
        "time_based": "1",
        "runtime": args.runtime,
        "ramp_time": args.ramp_time,
        "stripe_unit": args.stripe_unit,
        "fixedbufs": str(int(args.fixedbufs)),
        "stonewall": "1",
    }
    if args.size:
        shared["size"] = args.size
    if args.direct:
        shared["direct"] = args.direct
    sections = []
    for engine in engines:
        for size in sizes:
            for depth in depths:
                values = {**shared, "engine": engine, "bs": str(size), "iodepth": str(depth)}
                name = f"{engine}-{size}-{depth}"
                sections.append(
                    Section(name, [Setting(key, value, "") for key, value in values.items()])
                )
    return build_jobs(sections)[0]


def find_members(words: Sequence[str]) -> list[str]:
    """The members that the command names: a word that is no file itself may be a colon list.

    Raises
    ------
    BenchError
        One is not there. A sweep makes no files: it would measure their holes.
    """
    found = [
        path
        for word in words
        for path in ([word] if os.path.exists(word) else units.split_escaped(word, ":"))
    ]
    for path in found:
        if not os.path.exists(path):
            raise BenchError(f"{path}: no such file or device")
    return found


def _in_words(error: UsageError | BenchError) -> UsageError | BenchError:
    """The same error without the name of a sweep's job, which nobody has given."""
    return type(error)(re.sub(r"^job \S+-\d+-\d+: ", "", str(error)))


def _split(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"{name} is an empty list")
    return parts


def recommend(points: Sequence[Point]) -> Recommendation:
    """The cheapest combination that is as fast as the fastest.

    Among those within 3 % of the best bandwidth: the lowest p99 latency wins, since deeper queues
    and larger blocks only add waiting once the members are busy.
    """
    best = max(points, key=lambda point: point.bw_bytes)
    good = [point for point in points if point.bw_bytes >= _AS_GOOD * best.bw_bytes]
    chosen = min(good, key=lambda point: (point.p99_ns, point.iodepth, point.block_bytes))
    reason = f"{format_rate(chosen.bw_bytes)} with p99 {format_ns(chosen.p99_ns)}"
    if chosen is best:
        reason += " is the highest bandwidth of all"
        if len(good) > 1:
            reason += f", at the lowest p99 of the {len(good)} combinations within 3 % of it"
    else:
        reason += (
            f" is within 3 % of the highest bandwidth ({format_rate(best.bw_bytes)} at "
            f"{format_size(best.block_bytes)}, depth {best.iodepth}, "
            f"p99 {format_ns(best.p99_ns)}), "
            f"at the lowest p99 of the {len(good)} combinations that are"
        )
    deepest = max(point.iodepth for point in points)
    if (
        chosen.iodepth == deepest
        and best.iodepth == deepest
        and len({point.iodepth for point in points}) > 1
    ):
        reason += f"; bandwidth still grew up to depth {deepest}, so try deeper"
    return Recommendation(chosen, reason)


def sweep_table(points: Sequence[Point]) -> str:
    """All points as a table."""
    rows = [
        (
            point.engine,
            format_size(point.block_bytes),
            str(point.iodepth),
            format_rate(point.bw_bytes),
            format_count(point.iops),
            format_ns(point.p50_ns),
            format_ns(point.p99_ns),
            f"{point.cpu_s_per_gb:.3f}",
        )
        for point in points
    ]
    header = ("engine", "block", "depth", "bandwidth", "IOPS", "p50", "p99", "CPU s/GB")
    return table(rows, header=header, right="lrrrrrrr")


def _command(args: argparse.Namespace, chosen: Point) -> str:
    members = shlex.quote(units.join_escaped(args.members, ":"))
    fixed = " --fixedbufs" if args.fixedbufs else ""
    engine = f" --engine={chosen.engine}" if chosen.engine != "auto" else ""
    return (
        f"kvio bench --filename={members} --rw={args.rw} "
        f"--bs={units.spell_size(chosen.block_bytes)} --iodepth={chosen.iodepth} "
        f"--stripe-unit={args.stripe_unit}{engine}{fixed} --runtime=10 --time_based"
    )


def run(args: argparse.Namespace) -> int:
    """Run the sweep. Returns the exit code."""
    try:
        return _sweep(args)
    except (UsageError, BenchError) as error:
        raise _in_words(error) from None


def _sweep(args: argparse.Namespace) -> int:
    args.members = find_members(args.members)
    jobs = build_sweep(args)
    if args.plot:
        from kvio.cli import plot  # noqa: PLC0415 - matplotlib is optional and slow to import

        plot.check_target(args.plot)
    # Here and not at the top: these need the compiled engine, and --help should not.
    from kvio.cli import guard  # noqa: PLC0415
    from kvio.cli.progress import Progress  # noqa: PLC0415
    from kvio.cli.runner import Runner  # noqa: PLC0415

    guard.prepare_members(jobs, allow_destroy=args.allow_destroy, readonly=False, say=warn)
    points: list[Point] = []
    code = EXIT_OK
    for number, job in enumerate(jobs, 1):
        with Progress() as progress:
            result = Runner(allow_destroy=args.allow_destroy, progress=progress.update).run([job])
        if result.exit_code:
            code = result.exit_code
            for text in [
                *(text for _, text in result.failures),
                *(m for r in result.results for m in r.messages),
            ]:
                warn(str(_in_words(BenchError(text))))
            break
        point = _point(job, result)
        points.append(point)
        if sys.stderr.isatty():
            warn(
                f"{number}/{len(jobs)}: {format_size(point.block_bytes)} "
                f"depth {point.iodepth}: {format_rate(point.bw_bytes)}"
            )
    if points:
        _report(args, points)
    assert code in (EXIT_OK, EXIT_IO_ERROR, EXIT_USAGE, EXIT_INTERRUPTED)
    return code


def _point(job: Job, run_result: Any) -> Point:
    result = merge_results(run_result.results, interval_s=job.sample_ms / 1000)
    direction = result.write if job.writes else result.read
    settings = dict(job.settings)
    return Point(
        settings["engine"],
        job.write_bs if job.writes else job.read_bs,
        job.iodepth,
        direction.bytes_per_s,
        direction.ios_per_s,
        direction.latency.percentile(50),
        direction.latency.percentile(99),
        result.cpu_s_per_gb,
    )


def _report(args: argparse.Namespace, points: list[Point]) -> None:
    found = recommend(points)
    command = _command(args, found.point)
    if args.json:
        document = {
            "rw": args.rw,
            "members": args.members,
            "points": [asdict(point) for point in points],
            "recommendation": {**asdict(found.point), "reason": found.reason, "command": command},
        }
        print(json.dumps(document, indent=2))
    else:
        print(sweep_table(points))
        print(
            f"\nrecommended: {format_size(found.point.block_bytes)} blocks, "
            f"depth {found.point.iodepth}"
            + (
                f", engine {found.point.engine}"
                if len({point.engine for point in points}) > 1
                else ""
            )
            + f"\n  why: {found.reason}\n  try: {command}"
        )
    if args.plot:
        from kvio.cli import plot  # noqa: PLC0415

        plot.draw_tune(
            points, found, args.plot, title=f"{args.rw} over {len(args.members)} member(s)"
        )
        warn(f"plot written to {args.plot}")
