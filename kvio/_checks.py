"""Checks of arguments, with errors that name the argument and what is expected."""

from __future__ import annotations

from typing import Any

__all__ = ["choice", "count"]


def choice(name: str, value: Any, table: dict[Any, int]) -> int:
    """The core's number for one of a few words."""
    try:
        return table[value]
    except (KeyError, TypeError):
        allowed = ", ".join(repr(key) for key in table)
        raise ValueError(f"{name}={value!r}: one of {allowed} expected") from None


def count(name: str, value: int | None, *, least: int = 1, most: int = 2**32 - 1) -> int:
    """An integer within bounds; None is 0, the core's word for its default."""
    if value is None:
        return 0
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: an integer expected")
    number = int(value.__index__())
    if not least <= number <= most:
        raise ValueError(f"{name}={number}: must lie between {least} and {most}")
    return number
