"""From sections and settings to jobs, validated before anything is opened."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from typing import Any

from kvio.cli import units
from kvio.cli.common import UsageError
from kvio.cli.jobfile import Section, Setting
from kvio.cli.jobs import MAX_DEPTH, Job
from kvio.cli.offsets import parse_distribution
from kvio.cli.options import OPTIONS, canonical, classify
from kvio.cli.verify import check_settings

DEFAULT_PERCENTILES = (
    1.0,
    5.0,
    10.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    70.0,
    80.0,
    90.0,
    95.0,
    99.0,
    99.5,
    99.9,
    99.95,
    99.99,
)

# fio's rw word -> (random offsets, reads, writes)
_PATTERNS = {
    "read": (False, True, False),
    "write": (False, False, True),
    "randread": (True, True, False),
    "randwrite": (True, False, True),
    "rw": (False, True, True),
    "readwrite": (False, True, True),
    "randrw": (True, True, True),
}
_SYNC_ENGINES = ("sync", "psync", "vsync", "pvsync", "pvsync2")
_ENGINES = {
    "io_uring": ("io_uring", ""),
    "io_uring_cmd": ("io_uring_cmd", ""),
    "libaio": ("io_uring", "ioengine=libaio runs as kvio's io_uring engine"),
    "posixaio": ("threads", "ioengine=posixaio runs as kvio's threads engine"),
}
_VERIFY_OTHER = {
    "crc32c-intel": "crc32c",
    "crc16": "crc32",
    "crc7": "crc32",
    "crc64": "crc32",
    "sha3_256": "sha3-256",
}


class _Reader:
    """Parses the values of one job's settings, last one wins."""

    def __init__(self, section: str) -> None:
        self.section = section
        self.values: dict[str, Any] = {}
        self.kb_base = 1024

    def take(self, setting: Setting) -> str | None:
        """Parse one setting; returns a note when it has no meaning for kvio."""
        name = canonical(setting.name)
        try:
            note = classify(name)
            if note is None:
                if OPTIONS[name].scope == "run":
                    raise UsageError(f"{name} belongs on the command line, not in a job file")
                self.values[name] = self.parse(OPTIONS[name].kind, name, setting.value)
            return note
        except UsageError as error:
            raise UsageError(
                f"{setting.where}: {setting.name}: {error}" if setting.where else str(error)
            ) from None

    def parse(self, kind: str, name: str, value: str) -> Any:
        if name == "kb_base":
            self.kb_base = units.parse_int(value)
            if self.kb_base not in (1000, 1024):
                raise UsageError(f"kb_base={value} is neither 1000 nor 1024")
            return self.kb_base
        if value == "" and name not in ("rate", "rate_iops", "description"):
            raise UsageError(f"option {name} needs a value")
        if kind == "size":
            return units.parse_size(value, kb_base=self.kb_base)
        if kind == "sizes":
            pair = units.per_direction(value, name)
            return tuple(
                units.parse_size(part, kb_base=self.kb_base) if part else 0 for part in pair
            )
        if kind == "ints":
            return tuple(
                units.parse_size(part, kb_base=1000) if part else 0
                for part in units.per_direction(value, name)
            )
        if kind == "extent":
            return units.parse_extent(value, kb_base=self.kb_base)
        if kind == "time":
            return units.parse_time_s(value)
        if kind == "int":
            return units.parse_int(value)
        if kind == "bool":
            return units.parse_bool(value)
        if kind == "float_list":
            return _parse_percentiles(value)
        return value

    def get(self, name: str) -> Any:
        """The value, or the option's default in parsed form."""
        if name not in self.values:
            default = OPTIONS[name].default
            return None if default is None else _Reader("").parse(OPTIONS[name].kind, name, default)
        return self.values[name]


def _parse_percentiles(value: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in value.split(":") if part)
    except ValueError:
        found = ()
    if not found or len(found) > 20 or not all(0 < part <= 100 for part in found):
        raise UsageError(
            f"{value!r} is not a list of 1 to 20 percentiles above 0 up to 100, such as 50:99:99.9"
        )
    return tuple(sorted(found))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Read fio's CPU list: '0,2-3'."""
    cpus: set[int] = set()
    try:
        for part in text.replace(":", ",").split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise UsageError(f"cpus_allowed={text} is not a list such as 0,2-3") from None
    missing = cpus - os.sched_getaffinity(0)
    if missing or not cpus:
        raise UsageError(
            f"cpus_allowed={text}: CPU {min(missing, default=0)} is not available to this process"
        )
    return tuple(sorted(cpus))


def build_jobs(
    sections: Sequence[Section], *, readonly: bool = False
) -> tuple[list[Job], list[str]]:
    """Turn sections into validated jobs. Returns the jobs and the notes on their options.

    Raises
    ------
    UsageError
        With the job's name and the option at fault.
    """
    jobs, notes = [], []
    for number, section in enumerate(sections):
        reader = _Reader(section.name)
        taken = [reader.take(setting) for setting in section.settings]
        try:
            job, more = _build(reader, section, number)
        except UsageError as error:
            raise UsageError(f"job {section.name}: {error}") from None
        if readonly and job.changes_members:
            raise UsageError(f"job {section.name}: rw={job.rw} writes, and --readonly forbids it")
        for note in [*(note for note in taken if note), *more]:
            if note not in notes:
                notes.append(note)
        jobs.append(job)
    return jobs, notes


def _build(reader: _Reader, section: Section, number: int) -> tuple[Job, list[str]]:
    get = reader.get
    notes: list[str] = []
    word = get("rw").lower()
    if word not in _PATTERNS:
        raise UsageError(f"rw={word} is not one of {', '.join(sorted(_PATTERNS))}")
    random, reads, writes = _PATTERNS[word]
    members, generated = _members(reader, section.name)
    engine, iodepth = _engine(reader, notes)
    bs = _block_sizes(reader)
    mix = 100 - get("rwmixwrite") if get("rwmixwrite") is not None else get("rwmixread")
    verify = _verify(reader, notes)
    batches = [get("iodepth_batch"), get("iodepth_batch_complete_min")]
    batch = max(
        (iodepth if value == 0 else value for value in batches if value is not None), default=1
    )
    shared = section.settings[: section.global_count]
    job = Job(
        name=section.name,
        members=members,
        generated_members=generated,
        random=random,
        reads=reads,
        writes=writes,
        read_bs=bs[0],
        write_bs=bs[1],
        iodepth=iodepth,
        submit_batch=min(batch, iodepth) if batch > 1 else None,
        numjobs=get("numjobs"),
        thread=get("thread"),
        stonewall=get("stonewall"),
        new_group=get("new_group"),
        group_reporting=get("group_reporting"),
        size=get("size"),
        offset=get("offset"),
        offset_increment=get("offset_increment"),
        io_size=get("io_size"),
        number_ios=get("number_ios"),
        loops=get("loops"),
        filesize=get("filesize"),
        runtime_s=get("runtime") or 0.0,
        time_based=get("time_based"),
        ramp_s=get("ramp_time"),
        startdelay_s=get("startdelay"),
        direct=_direct(reader),
        engine=engine,
        rwmixread=mix,
        distribution=parse_distribution(get("random_distribution"), reader.kb_base),
        norandommap=get("norandommap"),
        seed=_seed(reader, number),
        rate=get("rate") or (0, 0),
        rate_iops=get("rate_iops") or (0, 0),
        verify=verify,
        do_verify=get("do_verify"),
        verify_only=get("verify_only"),
        verify_interval=get("verify_interval") or min(bs),
        verify_pattern=get("verify_pattern"),
        verify_fatal=get("verify_fatal"),
        zero_buffers=get("zero_buffers"),
        buffer_pattern=get("buffer_pattern"),
        fixedbufs=get("fixedbufs"),
        hugepages=get("hugepages"),
        hipri=get("hipri"),
        sqpoll=get("sqthread_poll"),
        workers=get("workers"),
        stripe_unit=get("stripe_unit"),
        deadline_s=get("deadline"),
        continue_on_error=get("continue_on_error"),
        exitall_on_error=get("exitall_on_error"),
        end_fsync=get("end_fsync"),
        create_only=get("create_only"),
        allow_file_create=get("allow_file_create"),
        unlink=get("unlink"),
        nice=get("nice"),
        cpus_allowed=parse_cpus(get("cpus_allowed")) if get("cpus_allowed") else (),
        percentiles=get("percentile_list") or DEFAULT_PERCENTILES,
        sample_ms=get("bwavgtime"),
        disk_util=get("disk_util"),
        description=get("description") or "",
        settings=_written(section.settings[section.global_count :]),
        global_settings=_written(shared),
    )
    _check(job)
    return job, notes


def _written(settings: Iterable[Setting]) -> tuple[tuple[str, str], ...]:
    return tuple((canonical(setting.name), setting.value) for setting in settings)


def _members(reader: _Reader, name: str) -> tuple[tuple[str, ...], bool]:
    filename, directory = reader.get("filename"), reader.get("directory")
    if filename:
        paths = units.split_escaped(filename, ":")
        if directory:
            paths = [os.path.join(directory, path) for path in paths]
        return tuple(paths), False
    count = reader.get("nrfiles")
    if not 1 <= count <= 256:
        raise UsageError(f"nrfiles={count} is not between 1 and 256")
    base = os.path.join(directory or "", name.replace("/", "_"))
    return tuple(f"{base}.{{copy}}.{index}" for index in range(count)), True


def _block_sizes(reader: _Reader) -> tuple[int, int]:
    read, write = reader.get("bs")
    page = reader.get("page_size")
    if page is None:
        return read, write
    if "bs" in reader.values and (read, write) != (page, page):
        raise UsageError("bs and page-size differ; they mean the same, give one of them")
    return page, page


def _engine(reader: _Reader, notes: list[str]) -> tuple[str, int]:
    """kvio's engine for fio's ioengine, and the depth that it can have."""
    own, fio, depth = reader.get("engine"), reader.get("ioengine"), reader.get("iodepth")
    if own not in ("auto", "io_uring", "threads", "io_uring_cmd"):
        raise UsageError(f"engine={own} is not one of auto, io_uring, threads, io_uring_cmd")
    if fio is None or "engine" in reader.values:
        return own, depth
    if fio in _SYNC_ENGINES:
        notes.append(
            f"ioengine={fio} runs as kvio's threads engine with one I/O in flight, as in fio; "
            "--engine=threads has no such limit"
        )
        return "threads", 1
    if fio not in _ENGINES:
        raise UsageError(
            f"ioengine={fio} is not supported; kvio maps {', '.join((*_ENGINES, *_SYNC_ENGINES))}"
        )
    engine, note = _ENGINES[fio]
    if note:
        notes.append(note)
    return engine, depth


def _direct(reader: _Reader) -> bool | str:
    if "direct" in reader.values:
        return bool(reader.values["direct"])
    if "buffered" in reader.values:
        return not reader.values["buffered"]
    return "prefer"


def _seed(reader: _Reader, number: int) -> int:
    if reader.get("randseed") is not None:
        return int(reader.get("randseed"))
    base = 0x6B76696F if reader.get("randrepeat") else int.from_bytes(os.urandom(6), "little")
    return base + number * 104729


def _verify(reader: _Reader, notes: list[str]) -> str | None:
    name = reader.get("verify")
    if reader.get("verify_pattern") is not None and name is None:
        name = "pattern"
    if name in (None, "0", "null"):
        return None
    if name in _VERIFY_OTHER:
        if name != "crc32c-intel":
            notes.append(f"verify={name} is checked with {_VERIFY_OTHER[name]}, which is stronger")
        name = _VERIFY_OTHER[name]
    if name == "crc32c" and importlib.util.find_spec("crc32c") is None:
        notes.append(
            "verify=crc32c is checked with crc32, since the Python package crc32c is not installed"
        )
        name = "crc32"
    return str(name)


def _check(job: Job) -> None:
    """Refuse what cannot run, in the words of the options."""
    positive = {
        "bs": min(job.read_bs, job.write_bs),
        "iodepth": job.iodepth,
        "numjobs": job.numjobs,
        "loops": job.loops,
        "stripe_unit": job.stripe_unit,
        "bwavgtime": job.sample_ms,
        "workers": job.workers,
        "verify_interval": job.verify_interval,
        "number_ios": 1 if job.number_ios is None else job.number_ios,
        "deadline": 1 if job.deadline_s is None else job.deadline_s,
    }
    for name, value in positive.items():
        if value <= 0:
            raise UsageError(f"{name} must be greater than 0")
    if job.iodepth > MAX_DEPTH:
        raise UsageError(f"iodepth={job.iodepth} is more than the engine's {MAX_DEPTH}")
    if job.stripe_unit & (job.stripe_unit - 1):
        raise UsageError(f"stripe-unit={job.stripe_unit} is not a power of two")
    if len(set(job.members)) != len(job.members):
        raise UsageError("filename names a member twice")
    if not 0 <= job.rwmixread <= 100:
        raise UsageError(f"rwmixread={job.rwmixread} is not between 0 and 100")
    if job.time_based and not job.runtime_s:
        raise UsageError("time_based needs a runtime")
    if job.hugepages not in ("auto", "require", "off"):
        raise UsageError(f"hugepages={job.hugepages} is not one of auto, require, off")
    if job.continue_on_error not in ("none", "read", "write", "io", "all", "verify", "0", "1"):
        raise UsageError(
            f"continue_on_error={job.continue_on_error} is not one of "
            "none, read, write, io, verify, all"
        )
    if job.verify_only and not job.verify:
        raise UsageError("verify_only needs verify")
    check_settings(job)
