"""``kvio bench``: fio's command line over striped volumes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvio.cli import options, units
from kvio.cli.common import EXIT_OK, BenchError, UsageError, warn
from kvio.cli.jobfile import Section, Setting, parse_job_file
from kvio.cli.jobs import Job
from kvio.cli.jobspec import build_jobs

if TYPE_CHECKING:
    from kvio.cli.runner import RunResult

_DESCRIPTION = """\
Measure striped reads and writes with fio's options, job files and JSON report.
Everything before the first --name applies to all jobs; each --name starts another one.
With job files, options of the command line override those of the files.
"""
_EPILOG = """\
example:
  kvio bench --filename=/dev/nvme1n1:/dev/nvme2n1 --rw=randread --bs=1m --iodepth=32 \\
             --runtime=10 --time_based

Without --direct, O_DIRECT is used where the members allow it. A member that does not exist is made
(give --size); one that holds data is written only with --allow-destroy.
The reference of all options is docs/cli.md.
"""


@dataclass(slots=True)
class RunOptions:
    """Options of the whole command."""

    readonly: bool = False
    allow_destroy: bool = False
    output: str | None = None
    formats: tuple[str, ...] = ("normal",)
    sections: list[str] = field(default_factory=list)
    plot: str | None = None
    compare_fio: bool = False
    pairs: int = 1


class _Record(argparse.Action):
    """Keeps options in the order in which they were given: --name splits them into jobs."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        given = getattr(namespace, "given", None) or []
        namespace.given = [*given, (self.dest, values)]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``bench`` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="measure reads and writes, with fio's options",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="kvio bench [--option=value ...] [job-file ...]",
    )
    parser.add_argument("job_files", nargs="*", metavar="job-file", help="fio job files")
    sections: dict[str, Any] = {}
    for option in options.OPTIONS.values():
        if option.section not in sections:
            sections[option.section] = parser.add_argument_group(option.section)
        default = f" (default {option.default})" if option.default not in (None, "0") else ""
        sections[option.section].add_argument(
            options.spelling(option.name),
            dest=option.name,
            action=_Record,
            metavar="N" if option.kind in ("int", "size", "time", "sizes") else "X",
            help=(option.help + default).replace("%", "%%"),
        )


def normalize(argv: Sequence[str]) -> list[str]:
    """Rewrite fio's spellings so that argparse reads them as fio does.

    ``--stripe_unit`` and ``--stripe-unit`` are one option, a flag needs no value, and an option
    that has no meaning here or is not supported gets its own message instead of argparse's.

    Raises
    ------
    UsageError
        An option is unknown or not supported.
    """
    found: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            found += ["--", *words]
            break
        if not word.startswith("--") or word == "--help":
            found.append(word)
            continue
        text, equals, value = word[2:].partition("=")
        name = options.canonical(text)
        try:
            note = options.classify(name)
        except UsageError as error:
            raise UsageError(str(error).replace(f"option {name}", f"option --{text}")) from None
        if note is not None:
            found.append(f"--note={note}")
            if not equals and name not in options.FLAGS and words and not words[0].startswith("-"):
                words.pop(0)
            continue
        if equals:
            found.append(f"{options.spelling(name)}={value}")
        elif name in options.FLAGS:
            found.append(f"{options.spelling(name)}=1")
        elif not words:
            raise UsageError(f"option --{text} needs a value")
        else:
            found.append(f"{options.spelling(name)}={words.pop(0)}")
    return found


def split_notes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the notes that normalize() left from the arguments."""
    notes = [word.partition("=")[2] for word in argv if word.startswith("--note=")]
    return [word for word in argv if not word.startswith("--note=")], notes


def take_run_options(given: Sequence[tuple[str, str]]) -> tuple[RunOptions, list[tuple[str, str]]]:
    """Split the options of the whole command from those of jobs."""
    run, rest = RunOptions(), []
    for name, value in given:
        if options.OPTIONS[name].scope == "job":
            rest.append((name, value))
        elif name == "section":
            run.sections.append(value)
        elif name == "output_format":
            run.formats = tuple(part.strip() for part in value.split(","))
            unknown = [part for part in run.formats if part not in ("normal", "json", "json+")]
            if unknown:
                raise UsageError(f"output-format={unknown[0]} is not one of normal, json, json+")
        elif name == "pairs":
            run.pairs = units.parse_int(value)
            if run.pairs < 1:
                raise UsageError("pairs must be greater than 0")
        elif options.OPTIONS[name].kind == "bool":
            setattr(run, name, units.parse_bool(value))
        else:
            setattr(run, name, value)
    return run, rest


def collect_sections(
    job_files: Sequence[str], given: Sequence[tuple[str, str]], wanted: Sequence[str]
) -> list[Section]:
    """The jobs of the files with the command line's options on top, or the command line's own.

    Raises
    ------
    UsageError
        There is no job, or a wanted section does not exist.
    """
    settings = [Setting(name, value, "") for name, value in given]
    sections = [section for path in job_files for section in parse_job_file(path)]
    if sections:
        if any(setting.name == "name" for setting in settings):
            raise UsageError("--name starts a job of its own; it cannot be used with job files")
        for section in sections:
            section.settings += settings
    else:
        shared: list[Setting] = []
        for setting in settings:
            if setting.name == "name":
                sections.append(Section(setting.value, [*shared, setting], len(shared)))
            elif sections:
                sections[-1].settings.append(setting)
            else:
                shared.append(setting)
        if not sections:
            if not shared:
                raise UsageError(
                    "nothing to do: give --filename and --rw, or a job file (see kvio bench --help)"
                )
            sections = [Section("kvio", shared)]
    if wanted:
        missing = set(wanted) - {section.name for section in sections}
        if missing:
            raise UsageError(f"no section {sorted(missing)[0]} in the job files")
        sections = [section for section in sections if section.name in wanted]
    return sections


def run(args: argparse.Namespace) -> int:
    """Run the jobs and write the report. Returns the exit code."""
    run_options, given = take_run_options(getattr(args, "given", None) or [])
    sections = collect_sections(args.job_files, given, run_options.sections)
    jobs, notes = build_jobs(sections, readonly=run_options.readonly)
    notes = [*args.notes, *notes]
    if run_options.plot:
        from kvio.cli import plot  # noqa: PLC0415 - matplotlib is optional and slow to import

        plot.check_target(run_options.plot)
    if run_options.compare_fio:
        from kvio.cli import compare  # noqa: PLC0415

        compare.check_jobs(jobs)
    return _execute(jobs, notes, run_options)


def _execute(jobs: list[Job], notes: list[str], run_options: RunOptions) -> int:
    # Here and not at the top: these need the compiled engine, and --help should not.
    from kvio.cli import guard, reporting  # noqa: PLC0415
    from kvio.cli.progress import Progress  # noqa: PLC0415
    from kvio.cli.runner import Runner  # noqa: PLC0415

    output = reporting.Output(run_options.output)
    made = guard.prepare_members(
        jobs,
        allow_destroy=run_options.allow_destroy,
        readonly=run_options.readonly,
        say=notes.append,
    )
    runnable = [job for job in jobs if not job.create_only]
    if not runnable:
        output.write("".join(f"note: {note}\n" for note in notes))
        return EXIT_OK

    def run_once() -> RunResult:
        with Progress() as progress:
            return Runner(allow_destroy=run_options.allow_destroy, progress=progress.update).run(
                runnable
            )

    result = run_once()
    comparison = None
    if run_options.compare_fio and result.exit_code == EXIT_OK:
        from kvio.cli import compare  # noqa: PLC0415

        try:
            comparison = compare.compare(runnable, result, run_once, pairs=run_options.pairs)
        except KeyboardInterrupt:
            result.interrupted = True  # the report of what kvio did is still to come
        except BenchError as error:
            result.failures.append(("io", str(error)))
    for _, text in result.failures:
        warn(text)
    if result.results:
        reporting.write_reports(
            result,
            output,
            formats=run_options.formats,
            notes=notes,
            comparison=comparison,
        )
        if run_options.plot:
            reporting.draw(result, run_options.plot, comparison)
            warn(f"plot written to {run_options.plot}")
    output.close()
    guard.unlink_members(
        path
        for job in jobs
        if job.unlink
        for copy in job.copies()
        for path in copy.members
        if path in made
    )
    return result.exit_code
