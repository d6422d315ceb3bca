"""The options of ``kvio bench``: fio's words, and the few of kvio's own.

Three kinds of fio option exist here. USED ones do what fio's manual says. NOTED ones have no
meaning for this engine; a job file that carries them still runs, and the report says so. REFUSED
ones would change what is measured, so leaving them out silently would be a lie; the run stops and
names them. A word in none of the three lists is unknown and is refused too.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvio.cli.common import UsageError
from kvio.cli.fio_only import NOTED, REFUSED


@dataclass(frozen=True, slots=True)
class Option:
    """One option that does something.

    Attributes
    ----------
    kind : size, sizes, extent, int, ints, time, bool, str, float_list: how the value is parsed
    section : heading in the help text
    help : what it does
    default : as a person would write it; None when leaving it out differs from any value
    aliases : other spellings
    scope : 'job' for one job, 'run' for the whole command (command line only)
    """

    name: str
    kind: str
    section: str
    help: str
    default: str | None = None
    aliases: tuple[str, ...] = ()
    scope: str = "job"


def _options() -> tuple[Option, ...]:
    job, what, size, load = "job", "members", "how much", "load"
    pace, check, own, output = "pace", "verification", "kvio's own", "output"
    return (
        Option("name", "str", job, "name of the job; each --name starts another one"),
        Option("description", "str", job, "text that is kept with the job"),
        Option("numjobs", "int", job, "copies of the job that run at once", "1"),
        Option("thread", "bool", job, "copies are threads of one process, not processes", "0"),
        Option(
            "stonewall",
            "bool",
            job,
            "wait for the jobs before this one",
            "0",
            ("wait_for_previous",),
        ),
        Option("new_group", "bool", job, "start another reporting group", "0"),
        Option("group_reporting", "bool", job, "one report for all jobs of a group", "0"),
        Option("startdelay", "time", job, "wait this long before the job starts", "0"),
        Option("cpus_allowed", "str", job, "CPUs the job may use: 0,2-3"),
        Option("nice", "int", job, "scheduling priority of the job's process", "0"),
        Option("exitall_on_error", "bool", job, "stop all jobs when this one fails", "0"),
        Option("filename", "str", what, r"members, separated by colons (\: is a colon in a name)"),
        Option("directory", "str", what, "where members are made when no filename is given"),
        Option("nrfiles", "int", what, "how many members to make when no filename is given", "1"),
        Option("filesize", "size", what, "size of each member that is made"),
        Option("create_only", "bool", what, "make missing members and stop", "0"),
        Option("allow_file_create", "bool", what, "missing members may be made", "1"),
        Option("unlink", "bool", what, "remove the members that this run made", "0"),
        Option("readonly", "bool", what, "refuse any job that writes", "0", (), "run"),
        Option(
            "rw",
            "str",
            load,
            "read, write, randread, randwrite, rw, randrw",
            "read",
            ("readwrite",),
        ),
        Option("bs", "sizes", load, "bytes of one I/O, or read,write sizes", "4k", ("blocksize",)),
        Option("iodepth", "int", load, "I/Os in flight", "1"),
        Option(
            "iodepth_batch",
            "int",
            load,
            "submit in groups of this many",
            None,
            ("iodepth_batch_submit",),
        ),
        Option(
            "iodepth_batch_complete_min",
            "int",
            load,
            "collect in groups of this many",
            None,
            ("iodepth_batch_complete",),
        ),
        Option("iodepth_batch_complete_max", "int", load, "collect at most this many at once"),
        Option("ioengine", "str", load, "io_uring, libaio, psync, io_uring_cmd, ... (mapped)"),
        Option("direct", "bool", load, "1: O_DIRECT or nothing; 0: through the page cache"),
        Option("buffered", "bool", load, "the opposite of direct"),
        Option("rwmixread", "int", load, "percentage of reads in a mix", "50"),
        Option("rwmixwrite", "int", load, "percentage of writes in a mix"),
        Option(
            "random_distribution",
            "str",
            load,
            "random, zipf:THETA, pareto:H, normal:DEV, zoned:ACCESS/SIZE:..., zoned_abs",
            "random",
        ),
        Option(
            "norandommap", "bool", load, "random blocks may repeat before all were visited", "0"
        ),
        Option("randseed", "int", load, "seed of the random offsets"),
        Option("randrepeat", "bool", load, "the same offsets in every run", "1"),
        Option("zero_buffers", "bool", load, "write zeros", "0"),
        Option("buffer_pattern", "str", load, 'write this pattern: 0xdeadbeef, 123 or "text"'),
        Option("fixedbufs", "bool", load, "registered buffers from a kvio.BufferPool", "0"),
        Option("registerfiles", "bool", load, "registered files (kvio always tries)", "0"),
        Option("hipri", "bool", load, "polled completions (IOPOLL)", "0"),
        Option("sqthread_poll", "bool", load, "a kernel thread submits (SQPOLL)", "0"),
        Option("size", "extent", size, "bytes of the volume that are worked on, or N%"),
        Option("offset", "extent", size, "where that region starts, or N%", "0"),
        Option("offset_increment", "size", size, "each copy starts this much further", "0"),
        Option(
            "io_size", "extent", size, "bytes to move, when it is not size", None, ("io_limit",)
        ),
        Option("number_ios", "int", size, "stop after this many I/Os"),
        Option("loops", "int", size, "how often the work is repeated", "1"),
        Option("runtime", "time", size, "stop after this time", None, ("timeout",)),
        Option("time_based", "bool", size, "go on until runtime, repeating the region", "0"),
        Option("ramp_time", "time", size, "run this long before anything is counted", "0"),
        Option("rate", "sizes", pace, "at most this many bytes a second: read,write"),
        Option("rate_iops", "ints", pace, "at most this many I/Os a second: read,write"),
        Option(
            "verify", "str", check, "crc32c, crc32, xxhash, md5, sha1, sha256, sha512, pattern, ..."
        ),
        Option("do_verify", "bool", check, "read back after writing", "1"),
        Option("verify_only", "bool", check, "do not write; check what an earlier run wrote", "0"),
        Option("verify_interval", "size", check, "one header for each such piece of a block"),
        Option(
            "verify_pattern",
            "str",
            check,
            'pattern for verify=pattern: 0xdeadbeef, 123, "text", %o',
        ),
        Option("verify_fatal", "bool", check, "stop at the first bad block", "0"),
        Option("continue_on_error", "str", check, "none, read, write, io, all", "none"),
        Option(
            "end_fsync",
            "bool",
            check,
            "flush all members when the job ends",
            "0",
            ("fsync_on_close",),
        ),
        Option("percentile_list", "float_list", output, "percentiles to report: 50:99:99.9"),
        Option("bwavgtime", "int", output, "milliseconds of one bandwidth sample", "500"),
        Option("iopsavgtime", "int", output, "milliseconds of one IOPS sample", "500"),
        Option("disk_util", "bool", output, "report the block devices' utilisation", "1"),
        Option("output", "str", output, "write the report to this file", None, (), "run"),
        Option(
            "output_format",
            "str",
            output,
            "normal, json, json+, or several: json,normal",
            "normal",
            (),
            "run",
        ),
        Option(
            "section",
            "str",
            output,
            "only this section of the job files (repeatable)",
            None,
            (),
            "run",
        ),
        Option("kb_base", "int", output, "1024 or 1000: what k means from here on", "1024"),
        Option("stripe_unit", "size", own, "bytes on one member before the next one", "1m"),
        Option("page_size", "size", own, "a KV page: another word for bs"),
        Option("engine", "str", own, "auto, io_uring, threads, io_uring_cmd", "auto"),
        Option("deadline", "time", own, "give up on an I/O after this time"),
        Option("hugepages", "str", own, "of the pool: auto, require, off", "auto"),
        Option("workers", "int", own, "native worker threads of a volume", "1"),
        Option("allow_destroy", "bool", own, "write to members that hold data", "0", (), "run"),
        Option("plot", "str", own, "draw the run: OUT.png, OUT.svg or OUT.html", None, (), "run"),
        Option(
            "compare_fio",
            "bool",
            own,
            "run the same job under fio and print the ratio",
            "0",
            (),
            "run",
        ),
        Option(
            "pairs",
            "int",
            own,
            "with --compare-fio: pairs of runs, median reported",
            "1",
            (),
            "run",
        ),
    )


OPTIONS: dict[str, Option] = {option.name: option for option in _options()}

_ALIASES = {alias: option.name for option in OPTIONS.values() for alias in option.aliases}
_ALIASES["ddir"] = "rw"

# Options for which fio needs no value.
FLAGS = frozenset(
    {option.name for option in OPTIONS.values() if option.kind == "bool"}
    | {
        "exitall",
        "gtod_reduce",
        "disable_lat",
        "disable_clat",
        "disable_slat",
        "minimal",
        "refill_buffers",
    }
)


def canonical(word: str) -> str:
    """The one spelling of an option's name: fio's, with underscores."""
    name = word.strip().lower().replace("-", "_")
    return _ALIASES.get(name, name)


def spelling(name: str) -> str:
    """The option as it is typed on a command line."""
    own = OPTIONS[name].section == "kvio's own" or name == "output_format"
    return "--" + (name.replace("_", "-") if own else name)


def classify(name: str) -> str | None:
    """None for an option that is used, a note for one that has no meaning here.

    Raises
    ------
    UsageError
        The option is unknown, or known to fio and not supported.
    """
    if name in OPTIONS:
        return None
    if name in NOTED:
        return f"{name} has no effect: {NOTED[name]}"
    if name in REFUSED:
        raise UsageError(f"option {name} is not supported: {REFUSED[name]}")
    near = [option for option in OPTIONS if option.startswith(name[:4]) or name in option]
    hint = f"; did you mean {' or '.join(near[:3])}?" if near and name else ""
    raise UsageError(f"unknown option {name}{hint}")
