"""Pictures of a run: bandwidth over time, latency percentiles, balance of the members."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvio.cli.common import BenchError, UsageError, format_ns, format_rate, format_size
from kvio.cli.jobs import Job
from kvio.cli.report import describe, report_text
from kvio.cli.results import JobResult

if TYPE_CHECKING:
    from kvio.cli.compare import Comparison

_SUFFIXES = (".png", ".svg", ".html")
# Okabe and Ito's palette: told apart by people who see colours differently.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GRAY = "#6b7280"
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 99.999)
_TICKS = (50, 90, 99, 99.9, 99.99, 99.999)
_MAX_BARS = 24


def check_target(target: str) -> None:
    """Refuse a plot that could not be written, before the run.

    Raises
    ------
    UsageError
        The suffix is none of png, svg, html; or matplotlib is not installed.
    """
    if Path(target).suffix not in _SUFFIXES:
        raise UsageError(f"plot={target} does not end in .png, .svg or .html")
    if not Path(target).resolve().parent.is_dir():
        raise UsageError(f"plot={target}: there is no such directory")
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an optional package
    except ImportError:
        raise UsageError(
            "plot needs matplotlib, which is not installed (pip install 'kvio[plot]')"
        ) from None


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # noqa: PLC0415

    return Figure(figsize=(width, height), layout="constrained", dpi=120, facecolor="white")


def _clean(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color="#111827")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9ca3af")
    axes.tick_params(colors="#374151", labelsize=8.5)
    axes.grid(True, color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _series(reported: Sequence[tuple[Job, JobResult]]) -> list[tuple[str, str, JobResult]]:
    """(label, direction, result) of everything that moved bytes."""
    found = []
    for _, result in reported:
        for word in ("read", "write"):
            if getattr(result, word).ios:
                label = word if len(reported) == 1 else f"{result.name} {word}"
                found.append((label, word, result))
    return found


def draw_bench(
    reported: Sequence[tuple[Job, JobResult]], target: str, comparison: Comparison | None = None
) -> None:
    """Draw a run to ``target`` (png, svg or html)."""
    series = _series(reported)
    bars = min(_MAX_BARS, sum(len(result.members) for _, _, result in series))
    figure = _figure(11, 6.4 + max(0, bars - 8) * 0.22)
    grid = figure.add_gridspec(2, 2, height_ratios=[1.15, 1.0])
    _draw_bandwidth(figure.add_subplot(grid[0, :]), series, comparison)
    _draw_latency(figure.add_subplot(grid[1, 0]), series)
    _draw_members(figure.add_subplot(grid[1, 1]), series)
    title = "; ".join(f"{result.name}: {describe(job)}" for job, result in reported[:2])
    if len(reported) > 2:
        title += f"; and {len(reported) - 2} more"
    figure.suptitle(f"kvio bench   {title}", x=0.01, ha="left", fontsize=11.5, color="#111827")
    text = report_text(reported, notes=[], failures=[])
    save(
        figure,
        target,
        title=f"kvio bench: {title}",
        text=text + (comparison.text() if comparison else ""),
    )


def _draw_bandwidth(
    axes: Any, series: Sequence[tuple[str, str, JobResult]], comparison: Comparison | None
) -> None:
    _clean(axes, "Bandwidth over time")
    origin = min((result.started_s for _, _, result in series), default=0.0)
    scale, unit = _unit([getattr(result, word).bytes_per_s for _, word, result in series])
    top = 0.0
    for index, (label, word, result) in enumerate(series):
        color = _COLORS[index % len(_COLORS)]
        mean = getattr(result, word).bytes_per_s / scale
        edges, heights = [], []
        for sample in result.samples:
            edges += [sample.end_s - sample.seconds - origin, sample.end_s - origin]
            heights += [getattr(sample, f"{word}_bytes") / sample.seconds / scale] * 2
        if not edges:
            edges, heights = (
                [result.started_s - origin, result.started_s - origin + result.elapsed_s],
                [mean] * 2,
            )
        axes.fill_between(edges, heights, color=color, alpha=0.12, linewidth=0)
        axes.plot(
            edges,
            heights,
            color=color,
            linewidth=1.8,
            label=f"{label}, mean {format_rate(mean * scale)}",
        )
        top = max(top, *heights)
    for index, word in enumerate(("read", "write")):
        if comparison is not None and comparison.ratios(word):
            rate = comparison.median("fio", word).bw_bytes / scale
            axes.axhline(
                rate,
                color=_GRAY,
                linestyle="--" if index == 0 else ":",
                linewidth=1.4,
                label=f"fio {word}, {format_rate(rate * scale)}",
            )
            top = max(top, rate)
    axes.set_ylim(0, top * 1.18 or 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds", fontsize=9, color="#374151")
    axes.set_ylabel(unit, fontsize=9, color="#374151")
    if series:
        axes.legend(loc="lower right", frameon=False, fontsize=9, ncols=min(4, len(series) + 1))


def _unit(rates: Sequence[float]) -> tuple[float, str]:
    """The unit for an axis of bandwidths in bytes a second: (its size, its name)."""
    return (1e9, "GB/s") if max(rates, default=0.0) >= 1e9 else (1e6, "MB/s")


def _draw_latency(axes: Any, series: Sequence[tuple[str, str, JobResult]]) -> None:
    _clean(axes, "Latency percentiles")
    for index, (label, word, result) in enumerate(series):
        latency = getattr(result, word).latency
        # A percentile needs samples beyond it: 99.9 of 50 samples is only the maximum again.
        known = [p for p in _PERCENTILES if latency.count * (100 - p) / 100 >= 1]
        values = [latency.percentile(p) / 1e6 for p in known]
        color = _COLORS[index % len(_COLORS)]
        axes.plot(
            [_nines(p) for p in known],
            values,
            color=color,
            linewidth=1.8,
            marker="o",
            markersize=3.5,
            label=f"{label}: p50 {format_ns(latency.percentile(50))}, "
            f"p99 {format_ns(latency.percentile(99))}",
        )
    _log_scale(axes)
    axes.set_xticks([_nines(p) for p in _TICKS], [f"{p:g}" for p in _TICKS])
    axes.set_xlabel("percentile", fontsize=9, color="#374151")
    if series:
        axes.legend(loc="upper left", frameon=False, fontsize=8.5)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** (0.12 + 0.08 * len(series)))


def _log_scale(axes: Any) -> None:
    """A logarithmic axis of milliseconds, labelled in plain numbers at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.tick_params(which="minor", labelsize=7.5, colors="#6b7280")
    axes.set_ylabel("milliseconds (log)", fontsize=9, color="#374151")


def _nines(percent: float) -> float:
    """Position on an axis that gives each further nine the same width."""
    return -math.log10(1 - percent / 100)


def _draw_members(axes: Any, series: Sequence[tuple[str, str, JobResult]]) -> None:
    _clean(axes, "Balance of the members")
    names, rates, colors, shares = [], [], [], []
    for index, (label, word, result) in enumerate(series):
        total = sum(getattr(member, f"{word}_bytes") for member in result.members) or 1
        for member in result.members:
            moved = getattr(member, f"{word}_bytes")
            names.append(f"{_short(member.path)}" + (f" {label}" if len(series) > 1 else ""))
            rates.append(moved / max(getattr(result, word).runtime_s, 1e-9))
            colors.append(_COLORS[index % len(_COLORS)])
            shares.append(100 * moved / total)
    left_out = len(names) - _MAX_BARS
    if left_out > 0:
        names, rates, colors, shares = (
            values[:_MAX_BARS] for values in (names, rates, colors, shares)
        )
    places = range(len(names))
    scale, unit = _unit(rates)
    rates = [rate / scale for rate in rates]
    axes.barh(places, rates, color=colors, height=0.66, alpha=0.9)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlim(0, max(rates, default=0) * 1.32 or 1)
    for place, rate, share in zip(places, rates, shares, strict=True):
        axes.text(
            rate,
            place,
            f"  {format_rate(rate * scale)}  {share:.1f} %",
            va="center",
            fontsize=8,
            color="#374151",
        )
    axes.set_xlabel(
        unit + (f"   ({left_out} more not shown)" if left_out > 0 else ""),
        fontsize=9,
        color="#374151",
    )


def _short(path: str) -> str:
    return path if len(path) <= 22 else "..." + path[-19:]


def save(figure: Any, target: str, *, title: str, text: str) -> None:
    """Write a figure; html holds the picture and the report, and refers to nothing outside."""
    suffix = Path(target).suffix
    try:
        if suffix == ".html":
            picture = io.StringIO()
            figure.savefig(picture, format="svg", metadata={"Date": None})
            drawn = picture.getvalue()
            Path(target).write_text(
                _page(title, drawn[drawn.index("<svg") :], text), encoding="utf-8"
            )
        else:
            figure.savefig(target, format=suffix[1:])
    except OSError as error:
        raise BenchError(f"cannot write {target}: {error.strerror}") from None


def _page(title: str, svg: str, text: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; color: #111827; }}
body {{ margin: 2rem auto; max-width: 75rem; }}
svg {{ width: 100%; height: auto; }}
pre {{ background: #f3f4f6; padding: 1rem; overflow-x: auto; font-size: 12.5px; }}
</style>
</head>
<body>
{svg}
<pre>{html.escape(text)}</pre>
</body>
</html>
"""


def draw_tune(points: Sequence[Any], found: Any, target: str, *, title: str) -> None:
    """Draw a sweep: bandwidth and p99 latency against depth, a line for each block size."""
    figure = _figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    _clean(left, "Bandwidth")
    _clean(right, "p99 latency")
    lines: dict[tuple[str, int], list[Any]] = {}
    for point in points:
        lines.setdefault((point.engine, point.block_bytes), []).append(point)
    several = len({engine for engine, _ in lines}) > 1
    depths = sorted({point.iodepth for point in points})
    for index, ((engine, block), line) in enumerate(lines.items()):
        color = _COLORS[index % len(_COLORS)]
        style = "-" if index < len(_COLORS) else "--"
        label = format_size(block) + (f" {engine}" if several else "")
        line.sort(key=lambda point: point.iodepth)
        x = [point.iodepth for point in line]
        kind = {
            "color": color,
            "linestyle": style,
            "linewidth": 1.8,
            "marker": "o",
            "markersize": 4,
        }
        left.plot(x, [point.bw_bytes / 1e9 for point in line], label=label, **kind)
        right.plot(x, [point.p99_ns / 1e6 for point in line], label=label, **kind)
    chosen = found.point
    for axes, value in ((left, chosen.bw_bytes / 1e9), (right, chosen.p99_ns / 1e6)):
        axes.plot(
            [chosen.iodepth],
            [value],
            marker="o",
            markersize=13,
            color="none",
            markeredgecolor="#111827",
            linestyle="",
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [str(depth) for depth in depths])
        axes.xaxis.minorticks_off()
        axes.set_xlabel("I/Os in flight", fontsize=9, color="#374151")
    left.set_ylim(bottom=0)
    left.set_ylabel("GB/s", fontsize=9, color="#374151")
    _log_scale(right)
    right.legend(frameon=False, fontsize=9, loc="upper left")
    figure.suptitle(
        f"kvio tune   {title}: recommended {format_size(chosen.block_bytes)}, "
        f"depth {chosen.iodepth} (circled)",
        x=0.01,
        ha="left",
        fontsize=11.5,
        color="#111827",
    )
    save(figure, target, title=f"kvio tune: {title}", text=found.reason)
