"""From results to reports: grouping, formats, files, plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from kvio import __version__
from kvio.cli import fiojson, report
from kvio.cli.common import BenchError
from kvio.cli.compare import Comparison
from kvio.cli.jobs import Job
from kvio.cli.results import JobResult, merge_results
from kvio.cli.runner import RunResult


def group_results(run: RunResult) -> list[tuple[Job, JobResult]]:
    """One entry a copy, or one a group where its jobs ask for group_reporting."""
    reported: list[tuple[Job, JobResult]] = []
    members: dict[int, list[int]] = {}
    for index, (job, result) in enumerate(zip(run.jobs, run.results, strict=True)):
        if not job.group_reporting:
            reported.append((job, result))
            continue
        first_of_group = result.group not in members
        members.setdefault(result.group, []).append(index)
        if first_of_group:
            reported.append((job, result))
    merged = []
    for job, result in reported:
        if not job.group_reporting:
            merged.append((job, result))
            continue
        parts = [run.results[index] for index in members[result.group]]
        merged.append((job, merge_results(parts, interval_s=job.sample_ms / 1000)))
    return merged


class Output:
    """Where the reports go: a file that is opened before the run, or stdout."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._stream: TextIO = sys.stdout
        if path is not None:
            try:
                self._stream = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed in close()
            except OSError as error:
                raise BenchError(f"cannot write {path}: {error.strerror}") from None

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise BenchError(
                f"cannot write {self._path or 'the report'}: {error.strerror}"
            ) from None

    def close(self) -> None:
        if self._path is not None:
            self._stream.close()


def write_reports(
    run: RunResult,
    output: Output,
    *,
    formats: Sequence[str],
    notes: Sequence[str],
    comparison: Comparison | None,
) -> None:
    """Write every format that was asked for, in that order."""
    reported = group_results(run)
    for kind in formats:
        if kind == "normal":
            failures = [text for _, text in run.failures]
            text = report.report_text(reported, notes=notes, failures=failures)
            output.write(text + (f"\n{comparison.text()}\n" if comparison else ""))
        else:
            document = fiojson.report_json(
                run,
                reported,
                version=__version__,
                notes=notes,
                bins=kind == "json+",
                comparison=comparison.to_dict() if comparison else None,
            )
            output.write(json.dumps(document, indent=2) + "\n")


def draw(run: RunResult, target: str, comparison: Comparison | None) -> None:
    """Draw the run to a file."""
    from kvio.cli import plot  # noqa: PLC0415 - matplotlib is optional and slow to import

    plot.draw_bench(group_results(run), target, comparison)
