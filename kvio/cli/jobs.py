"""One job: what is to be measured. Built and validated by kvio.cli.jobspec."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvio.cli.offsets import Distribution

MAX_DEPTH = 4096
COPY_SEED = 7919


@dataclass(frozen=True, slots=True)
class Job:
    """One job, ready to run. Sizes in bytes, times in seconds, rates a second."""

    name: str
    members: tuple[str, ...]
    generated_members: bool  # made up from the job's name, one set for each copy
    random: bool
    reads: bool
    writes: bool
    read_bs: int
    write_bs: int
    iodepth: int
    submit_batch: int | None
    numjobs: int
    thread: bool
    stonewall: bool
    new_group: bool
    group_reporting: bool
    size: tuple[str, int] | None
    offset: tuple[str, int]
    offset_increment: int
    io_size: tuple[str, int] | None
    number_ios: int | None
    loops: int
    filesize: int | None
    runtime_s: float
    time_based: bool
    ramp_s: float
    startdelay_s: float
    direct: bool | str
    engine: str
    rwmixread: int
    distribution: Distribution
    norandommap: bool
    seed: int
    rate: tuple[int, int]  # bytes a second for reads and writes; 0 = no limit
    rate_iops: tuple[int, int]
    verify: str | None
    do_verify: bool
    verify_only: bool
    verify_interval: int
    verify_pattern: str | None
    verify_fatal: bool
    zero_buffers: bool
    buffer_pattern: str | None
    fixedbufs: bool
    hugepages: str
    hipri: bool
    sqpoll: bool
    workers: int
    stripe_unit: int
    deadline_s: float | None
    continue_on_error: str
    exitall_on_error: bool
    end_fsync: bool
    create_only: bool
    allow_file_create: bool
    unlink: bool
    nice: int
    cpus_allowed: tuple[int, ...]
    percentiles: tuple[float, ...]
    sample_ms: int
    disk_util: bool
    description: str
    settings: tuple[tuple[str, str], ...] = ()  # as written, for the JSON's "job options"
    global_settings: tuple[tuple[str, str], ...] = ()

    @property
    def mixed(self) -> bool:
        return self.reads and self.writes

    @property
    def rw(self) -> str:
        """fio's word for the pattern."""
        word = "rw" if self.mixed else "read" if self.reads else "write"
        return ("rand" if self.random else "") + word

    @property
    def changes_members(self) -> bool:
        return self.writes and not self.verify_only

    def copies(self) -> list[Job]:
        """The job once for each of numjobs."""
        return [
            replace(
                self,
                members=tuple(self.member_name(path, index) for path in self.members),
                offset=self.offset,
                seed=self.seed + index * COPY_SEED,
            )
            for index in range(self.numjobs)
        ]

    def member_name(self, path: str, index: int) -> str:
        return path.replace("{copy}", str(index)) if self.generated_members else path
