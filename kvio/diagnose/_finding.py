# SPDX-License-Identifier: Apache-2.0
"""What a check says, and what the checks look at: the host, below a root that tests can move."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from kvio import uring


class Severity(StrEnum):
    """How much a finding matters, least first."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"

    @property
    def rank(self) -> int:
        """0 for ok to 3 for fail."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    id
        Stable name, for scripts: "io_uring", "limits.memlock", "direct:/mnt/data".
    severity
        ok; info: good to know; warn: slower or riskier than it could be; fail: kvio cannot do
        its work as it is meant to.
    title
        What was found, in one line.
    detail
        The facts behind it, "" when the title says all.
    remedy
        The command or setting that changes it, "" when there is nothing to do.
    """

    id: str
    severity: Severity
    title: str
    detail: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain strings for JSON."""
        return {key: str(value) for key, value in asdict(self).items()}


@dataclass(frozen=True)
class Host:
    """Everything that the checks look at. `Host.live` fills it in; tests replace fields.

    Attributes
    ----------
    root
        What is read of /proc and /sys is read below it.
    capabilities
        What io_uring grants, found by trying.
    need_bytes
        Size of the buffers that the caller means to register.
    nofile
        RLIMIT_NOFILE (soft).
    cpus
        CPUs that this process may run on, of `cpus_online`.
    """

    capabilities: uring.Capabilities
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)
    need_bytes: int = 1 << 30
    nofile: int = 1024
    cpus: int = 1
    cpus_online: int = 1
    fio: str | None = None
    core_error: str = ""

    @classmethod
    def live(cls, *, root: str | os.PathLike[str] = "/", need_bytes: int = 1 << 30) -> Host:
        """This process on this machine."""
        return cls(
            capabilities=uring.capabilities(root=os.fspath(root)),
            root=Path(root),
            environ=dict(os.environ),
            need_bytes=need_bytes,
            nofile=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            cpus=len(os.sched_getaffinity(0)),
            cpus_online=os.cpu_count() or 1,
            fio=shutil.which("fio"),
            core_error=_core_error(),
        )

    def text(self, name: str) -> str | None:
        """A file's contents without blanks around; None when it cannot be read."""
        try:
            return (self.root / name).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """A file's contents as a decimal number."""
        try:
            return int(self.text(name) or "")
        except ValueError:
            return None

    def exists(self, name: str) -> bool:
        """There is such a file."""
        return (self.root / name).exists()

    def fields(self, name: str) -> dict[str, str]:
        """A file of `Key: value` lines, such as /proc/meminfo."""
        lines = (self.text(name) or "").splitlines()
        return {key.strip(): value.strip() for key, _, value in (ln.partition(":") for ln in lines)}


def _core_error() -> str:
    """Why the compiled engine cannot be loaded, or ""."""
    try:
        from kvio import _core  # noqa: F401, PLC0415 - its absence is a finding, not an error
    except ImportError as error:
        return str(error)
    return ""


def chosen(text: str | None) -> str:
    """The word in brackets of a sysfs choice such as "always [madvise] never", or ""."""
    return next((word.strip("[]") for word in (text or "").split() if word.startswith("[")), "")


def size(count: int) -> str:
    """A number of bytes in the largest binary unit that keeps it exact, or nearly so."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            value = count / (1 << shift)
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{count} B"


def worst(findings: Sequence[Finding]) -> Severity:
    """The gravest severity among them; ok when there are none."""
    return max((f.severity for f in findings), key=lambda s: s.rank, default=Severity.OK)
