"""Checks of arguments, with errors that name the argument and what is expected."""

from __future__ import annotations

from typing import Any

__all__ = ["choice", "count", "optional_count"]


def choice(name: str, value: Any, table: dict[Any, int]) -> int:
    """The core's number for one of a few words."""
    try:
        return table[value]
    except (KeyError, TypeError):
        allowed = ", ".join(repr(key) for key in table)
        raise ValueError(f"{name}={value!r}: one of {allowed} expected") from None


def optional_count(name: str, value: int | None, *, most: int = 2**32 - 1) -> int:
    """An integer from 1; None is 0, the core's word for its default."""
    return 0 if value is None else count(name, value, most=most)


def count(name: str, value: int, *, least: int = 1, most: int = 2**32 - 1) -> int:
    """An integer within bounds."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: an integer expected")
    number = int(value.__index__())
    if not least <= number <= most:
        raise ValueError(f"{name}={number}: must lie between {least} and {most}")
    return number
