"""The ``kvio`` command: bench, tune, info, doctor.

Exit codes: 0 done, 1 an I/O error or a member that cannot be used, 2 bad usage, 130 interrupted.
A person's mistake gets one line on stderr and no traceback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from kvio import __version__
from kvio.cli import bench, doctor, info, tune
from kvio.cli.common import (
    EXIT_INTERRUPTED,
    EXIT_IO_ERROR,
    EXIT_USAGE,
    BenchError,
    UsageError,
    warn,
)


class _Parser(argparse.ArgumentParser):
    """argparse, with one line instead of a usage text for a mistake."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser: argparse.ArgumentParser = _Parser(
        prog="kvio",
        description="Striped, parallel, direct I/O for LLM KV-cache pages.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvio {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    bench.add_parser(subparsers)
    tune.add_parser(subparsers)
    info.add_parser(subparsers)
    doctor.add_parser(subparsers)
    return parser


def _dispatch(argv: Sequence[str]) -> int:
    parser = build_parser()
    words = list(argv)
    notes: list[str] = []
    if words[:1] == ["bench"]:
        words, notes = bench.split_notes(["bench", *bench.normalize(words[1:])])
    args = parser.parse_args(words)
    if args.command is None:
        raise UsageError("a command is needed: bench, tune, info or doctor (see kvio --help)")
    if args.command == "bench":
        args.notes = notes
        return bench.run(args)
    commands = {"tune": tune.run, "info": info.run, "doctor": doctor.run}
    return int(commands[args.command](args) or 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except UsageError as error:
        warn(str(error))
        return EXIT_USAGE
    except BenchError as error:
        warn(str(error))
        return EXIT_IO_ERROR
    except BrokenPipeError:
        # The reader went away (kvio ... | head): no message, and none at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        warn(str(error))
        return EXIT_IO_ERROR


if __name__ == "__main__":
    sys.exit(main())
