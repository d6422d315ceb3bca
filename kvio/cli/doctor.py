# SPDX-License-Identifier: Apache-2.0
"""``kvio doctor``: what slows kvio down or endangers data on this machine, and the remedy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvio.cli.units import parse_size

if TYPE_CHECKING:
    from kvio.diagnose import Finding

_STYLES = {"ok": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
_EXIT_FAIL = 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="check kernel, limits and devices, with the remedy for each finding",
        description=(
            "Check what kvio needs: io_uring, limits, huge pages, O_DIRECT, and how devices are "
            "set up. Changes nothing. Exit code 1 when a check fails."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "members",
        nargs="*",
        metavar="member",
        help="block device, file, or directory for files; default: all NVMe namespaces, unread",
    )
    parser.add_argument(
        "--pool-size",
        default="1g",
        metavar="SIZE",
        help="memory that is to be registered, for the limits and huge pages (default 1g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--root", default="/", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the findings. Returns 1 when one of them is a failure, else 0."""
    from kvio import diagnose  # noqa: PLC0415 - not needed for --help

    need_bytes = parse_size(args.pool_size)
    findings = diagnose.diagnose(args.members, root=args.root, need_bytes=need_bytes)
    worst = diagnose.worst(findings)
    if args.json:
        report = {"worst": str(worst), "findings": [finding.to_dict() for finding in findings]}
        print(json.dumps(report, indent=2))
    elif sys.stdout.isatty():
        _print_rich(findings)
    else:
        print(plain(findings))
    return _EXIT_FAIL if worst is diagnose.Severity.FAIL else 0


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each kind, in one line."""
    counts = {word: sum(f.severity == word for f in findings) for word in _STYLES}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def plain(findings: Sequence[Finding]) -> str:
    """For a pipe: one line a finding, and the facts and the remedy indented below it."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.severity:<5} {finding.id}: {finding.title}")
        if finding.detail:
            lines.append(f"      {finding.detail}")
        if finding.remedy:
            lines.append(f"      remedy: {finding.remedy}")
    return "\n".join([*lines, summary(findings)])


def _print_rich(findings: Sequence[Finding]) -> None:
    from rich.console import Console  # noqa: PLC0415 - slow to load, and for terminals only
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("severity", no_wrap=True)
    table.add_column("finding", ratio=1)
    for finding in findings:
        style = _STYLES[finding.severity]
        text = Text(finding.title)
        if finding.detail:
            text.append(f"\n{finding.detail}", style="dim")
        if finding.remedy:
            text.append("\n-> ", style="bold").append(finding.remedy)
        table.add_row(Text(str(finding.severity), style=style), text)
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(summary(findings), style="bold"))
