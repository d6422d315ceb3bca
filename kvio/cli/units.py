"""Sizes and times as fio reads them (checked against fio 3.33 by the tests)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvio.cli.common import UsageError

_NUMBER = re.compile(r"^(0x[0-9a-f]+|[0-9]+)([a-z]*)$")
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_TIME_NS = {
    "us": 1_000,
    "usec": 1_000,
    "ms": 1_000_000,
    "msec": 1_000_000,
    "s": 1_000_000_000,
    "sec": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
    "d": 86_400_000_000_000,
}


def parse_size(text: str, *, kb_base: int = 1024) -> int:
    """Read a size in bytes.

    fio's rule: k, kb and ki count in ``kb_base``; kib counts in the other base. So with the
    default of 1024, ``4k`` is 4096 and ``4kib`` is 4000.
    """
    match = _NUMBER.match(text.strip().lower())
    if not match:
        raise UsageError(f"{text!r} is not a size (a number, then k, m, g, t or p)")
    number = int(match[1], 0) if match[1].startswith("0x") else int(match[1])
    suffix, base = match[2], kb_base
    if suffix.endswith("ib") and len(suffix) == 3:
        suffix, base = suffix[:-2], 1000 if kb_base == 1024 else 1024
    elif len(suffix) == 2 and suffix[1] in "bi":
        suffix = suffix[:1]
    elif suffix == "b":
        suffix = ""
    if suffix not in _PREFIXES:
        raise UsageError(f"{text!r} has no size suffix that fio knows (k, m, g, t, p)")
    return int(number * base ** _PREFIXES[suffix])


def spell_size(count: int) -> str:
    """The shortest spelling that parse_size() reads back: 1048576 is '1m'."""
    for power, suffix in ((4, "t"), (3, "g"), (2, "m"), (1, "k")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{suffix}"
    return str(count)


def parse_time_s(text: str, *, default_unit: str = "s") -> float:
    """Read a time in seconds: ``10``, ``10s``, ``500ms``, ``2m`` (minutes), ``1h``, ``1d``."""
    match = _NUMBER.match(text.strip().lower())
    unit = (match[2] or default_unit) if match else ""
    if not match or unit not in _TIME_NS:
        raise UsageError(f"{text!r} is not a time (a number, then us, ms, s, m, h or d)")
    return int(match[1], 0 if match[1].startswith("0x") else 10) * _TIME_NS[unit] / 1e9


def parse_int(text: str) -> int:
    """Read a plain whole number; decimal or 0x."""
    try:
        return int(text.strip(), 0)
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None


def parse_bool(text: str) -> bool:
    """fio's booleans: 1 or 0; a bare option name means 1."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{text!r} is neither 0 nor 1")


def parse_extent(text: str, *, kb_base: int = 1024) -> tuple[str, int]:
    """Read a size that may be a share of the volume: ('bytes', n) or ('percent', n)."""
    word = text.strip()
    if word.endswith("%"):
        percent = parse_int(word[:-1])
        if not 0 <= percent <= 100:
            raise UsageError(f"{text!r} is not between 0% and 100%")
        return ("percent", percent)
    return ("bytes", parse_size(word, kb_base=kb_base))


def split_escaped(text: str, separator: str) -> list[str]:
    r"""Split on a separator that a backslash protects: ``/dev/a:/dev/b``, ``/x\:y``."""
    parts, current, escaped = [], "", False
    for character in text:
        if escaped:
            current += character if character == separator else "\\" + character
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == separator:
            parts.append(current)
            current = ""
        else:
            current += character
    parts.append(current + ("\\" if escaped else ""))
    return [part for part in parts if part]


def join_escaped(parts: Sequence[str], separator: str) -> str:
    """What split_escaped() takes apart again."""
    return separator.join(part.replace(separator, "\\" + separator) for part in parts)


def per_direction(text: str, what: str) -> tuple[str, str]:
    """Split fio's 'read,write[,trim]' value; one value serves both directions."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 3:
        raise UsageError(f"{what}={text} has more than read,write,trim values")
    return (parts[0], parts[1] if len(parts) > 1 else parts[0])
