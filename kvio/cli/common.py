"""What every command shares: the errors a person can cause, and numbers as people read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXIT_OK = 0
EXIT_IO_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class UsageError(Exception):
    """The command line or a job file asks for something that cannot be. Exit code 2."""


class BenchError(Exception):
    """I/O failed, or a member cannot be used. Exit code 1."""


def warn(text: str) -> None:
    """Print one line on stderr, where it does not disturb a report on stdout."""
    print(f"kvio: {text}", file=sys.stderr)


def format_rate(bytes_per_s: float) -> str:
    """Bandwidth in decimal units, as drives are sold: '4.21 GB/s', '812 MB/s'."""
    if bytes_per_s >= 999.5e6:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    if bytes_per_s >= 99.95e6:
        return f"{bytes_per_s / 1e6:.0f} MB/s"
    if bytes_per_s >= 999.5e3:
        return f"{bytes_per_s / 1e6:.1f} MB/s"
    return f"{bytes_per_s / 1e3:.1f} kB/s" if bytes_per_s else "0 B/s"


def format_bytes(count: float) -> str:
    """An amount of data in decimal units."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return (
                f"{count / limit:.3g} {unit}"
                if count < 999.5 * limit
                else f"{count / limit:.0f} {unit}"
            )
    return f"{count:.0f} B"


def format_size(count: int) -> str:
    """A block, file or stripe size in the binary units that sizes are chosen in."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            if count % (1 << shift) == 0:
                return f"{count >> shift} {unit}"
            if count >= 10 << shift or shift == 10:
                return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} B"


def format_count(count: float) -> str:
    """A number of operations: '4015', '43.2k', '1.25M'."""
    if count < 9999.5:
        return f"{count:.0f}"
    if count < 999.5e3:
        return f"{count / 1e3:.3g}k"
    return f"{count / 1e6:.3g}M"


def format_ns(ns: float) -> str:
    """A latency with three significant digits and its unit."""
    if ns < 999.5:
        return f"{ns:.0f} ns"
    if ns < 999.5e3:
        return f"{ns / 1e3:.3g} us"
    if ns < 999.5e6:
        return f"{ns / 1e6:.3g} ms"
    return f"{ns / 1e9:.3g} s"


def format_seconds(seconds: float) -> str:
    """A duration: '0.52 s', '12.3 s', '2:05'."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def table(rows: Sequence[Sequence[str]], *, header: Sequence[str], right: str = "") -> str:
    """Lay out a plain text table.

    Parameters
    ----------
    rows : cells as text, one sequence a row
    header : column titles
    right : one character a column, 'r' where it is aligned to the right
    """
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        parts = []
        for column, cell in enumerate(row):
            to_right = column < len(right) and right[column] == "r"
            parts.append(cell.rjust(widths[column]) if to_right else cell.ljust(widths[column]))
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
