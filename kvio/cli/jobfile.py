"""fio job files: an INI dialect with [global] sections, includes and variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvio.cli.common import UsageError

_MAX_INCLUDES = 8
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_FLAG_VALUE = "1"


@dataclass(frozen=True, slots=True)
class Setting:
    """One ``name=value`` and where it was written, for messages."""

    name: str
    value: str
    where: str


@dataclass(slots=True)
class Section:
    """One job: its name and its settings in order, those of [global] first."""

    name: str
    settings: list[Setting] = field(default_factory=list)
    global_count: int = 0  # how many of the settings came from [global]


def expand(text: str, environ: Mapping[str, str], where: str) -> str:
    """Replace ${NAME} from the environment, and fio's $pagesize, $mb_memory and $ncpus."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise UsageError(f"{where}: environment variable {match[1]} is not set")
        return environ[match[1]]

    text = _VARIABLE.sub(variable, text)
    for keyword, value in (
        ("$pagesize", os.sysconf("SC_PAGE_SIZE")),
        ("$mb_memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20),
        ("$ncpus", os.cpu_count() or 1),
    ):
        text = text.replace(keyword, str(value))
    return text


def _strip_comment(line: str) -> str:
    """Drop a whole-line comment, and one that follows a space and a semicolon or #."""
    line = line.strip()
    if line.startswith((";", "#")):
        return ""
    return re.split(r"\s[;#]", line, maxsplit=1)[0].strip()


def parse_job_file(
    path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None
) -> list[Section]:
    """Read a job file and everything that it includes.

    Raises
    ------
    UsageError
        The file cannot be read, or a line makes no sense; the message names the line.
    """
    parser = _Parser(os.environ if environ is None else environ)
    parser.read(Path(path), 0)
    if not parser.sections:
        raise UsageError(f"{path}: no job section")
    return parser.sections


class _Parser:
    """Collects sections over a file and its includes."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._shared: list[Setting] = []
        self._in_global = False
        self.sections: list[Section] = []

    def read(self, path: Path, depth: int) -> None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise UsageError(f"cannot read job file {path}: {reason}") from None
        for number, raw in enumerate(lines, 1):
            if line := _strip_comment(raw):
                self._take(line, path, f"{path}:{number}", depth)

    def _take(self, line: str, path: Path, where: str, depth: int) -> None:
        if line.startswith("["):
            self._begin(line, where)
            return
        words = line.split(None, 1)
        if words[0] == "include" and len(words) == 2:
            if depth >= _MAX_INCLUDES:
                raise UsageError(
                    f"{where}: files include each other more than {_MAX_INCLUDES} levels deep"
                )
            self.read(path.parent / expand(words[1], self._environ, where), depth + 1)
            return
        name, equals, value = line.partition("=")
        text = expand(value.strip(), self._environ, where) if equals else _FLAG_VALUE
        setting = Setting(name.strip(), text, where)
        if self._in_global:
            self._shared.append(setting)
        elif self.sections:
            self.sections[-1].settings.append(setting)
        else:
            raise UsageError(f"{where}: {line!r} stands before any [section]")

    def _begin(self, line: str, where: str) -> None:
        name = line[1:-1].strip()
        if not line.endswith("]") or not name:
            raise UsageError(f"{where}: {line!r} is not a section such as [name]")
        self._in_global = name == "global"
        if not self._in_global:
            self.sections.append(Section(name, list(self._shared), len(self._shared)))
