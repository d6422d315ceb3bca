"""One live line on a terminal: what moves now, how much is done, when it will end."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvio.cli import worker
from kvio.cli.common import format_bytes, format_count, format_rate, format_seconds
from kvio.cli.worker import Task

_WINDOW_S = 1.0
_BAR = 24


class Meter:
    """Turns cumulative progress messages into current rates and an estimate of the end."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, int, int, int, int]] = deque()
        self._started_s: float | None = None

    def line(self, tasks: list[Task], latest: dict[int, Any], now_s: float) -> str | None:
        """The line for now, or None while no worker has begun."""
        moving = {i: message for i, message in latest.items() if message[0] == worker.PROGRESS}
        if not moving:
            self._started_s = None
            self._history.clear()
            return None
        if self._started_s is None:
            self._started_s = now_s
        sums = [sum(message[column] for message in moving.values()) for column in range(2, 6)]
        point = (max(message[1] for message in moving.values()), *sums)
        if not self._history or point[0] > self._history[-1][0]:
            self._history.append(point)
        while len(self._history) > 2 and self._history[0][0] < point[0] - _WINDOW_S:
            self._history.popleft()
        first, last = self._history[0], self._history[-1]
        seconds = last[0] - first[0]
        parts = []
        for word, at in (("read", 1), ("write", 2)):
            if last[at] and seconds > 0:
                rate, iops = (
                    (last[at] - first[at]) / seconds,
                    (last[at + 2] - first[at + 2]) / seconds,
                )
                parts.append(f"{word} {format_rate(rate)}  {format_count(iops)} IOPS")
        done = self._done(tasks, sums[0] + sums[1], now_s)
        if done is not None:
            filled = round(_BAR * done)
            parts.insert(0, f"[{'=' * filled}{' ' * (_BAR - filled)}] {100 * done:3.0f} %")
            elapsed = now_s - self._started_s
            left = elapsed * (1 - done) / done if done > 0.001 else 0.0
            parts.append(f"ETA {format_seconds(round(left))}")
        parts.append(format_bytes(sums[0] + sums[1]))
        return "  ".join(parts)

    def _done(self, tasks: list[Task], moved: int, now_s: float) -> float | None:
        """Share of the work that is done; a timed run knows it by the clock."""
        assert self._started_s is not None
        limit_s = max((task.job.runtime_s for task in tasks), default=0.0)
        by_time = (now_s - self._started_s) / limit_s if limit_s else 0.0
        if all(task.job.time_based for task in tasks):
            return min(1.0, by_time)
        if not self.total_bytes:
            return min(1.0, by_time) if limit_s else None
        return min(1.0, max(by_time, moved / self.total_bytes))

    total_bytes = 0


class Progress:
    """Shows the meter's line on stderr when that is a terminal, otherwise does nothing."""

    def __init__(self, *, force: bool = False) -> None:
        console = Console(file=sys.stderr)
        self._live: Live | None = None
        self._meter = Meter()
        if console.is_terminal or force:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, tasks: list[Task], latest: dict[int, Any], now_s: float) -> None:
        """Redraw the line."""
        if self._live is None:
            return
        totals = [message[1] for message in latest.values() if message[0] == worker.READY]
        if totals and all(total is not None for total in totals):
            self._meter.total_bytes = sum(totals)
        line = self._meter.line(tasks, latest, now_s)
        self._live.update(Text(line or "starting", overflow="ellipsis", no_wrap=True), refresh=True)
