"""What the documents name exists, what exists is named, and their Python runs as printed."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvio
import kvio.devices
import kvio.diagnose
import kvio.errors
import kvio.testing
import kvio.uring
from kvio.cli import options

REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
PAGES = [README, *DOCS]
PYTHON = REPOSITORY / "docs" / "python.md"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


# --- reading Markdown ---


@cache
def text(page: Path) -> str:
    return page.read_text()


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """Everything outside of fenced blocks."""
    return re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)


def section(page: Path, heading: str) -> str:
    """What follows a heading, up to the next of the same level or a higher one."""
    level = heading.partition(" ")[0]
    start = re.search(rf"^{re.escape(heading)}$", text(page), re.MULTILINE)
    assert start, f"{page.name} has no heading {heading!r}"
    rest = text(page)[start.end() :]
    end = re.search(rf"^#{{1,{len(level)}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(part: str, column: str) -> set[str]:
    """The names in the first column of the tables whose first heading is ``column``."""
    names: set[str] = set()
    inside = False
    for line in part.splitlines():
        if not line.startswith("|"):
            inside = False
        elif line.startswith(f"| {column} |"):
            inside = True
        elif inside and not line.startswith("|---"):
            names |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    assert names, f"no table of {column!r}"
    return names


def signatures(part: str) -> dict[str, str]:
    """Of ``#### `name(arguments) -> type` ``: name and arguments."""
    found = re.findall(r"^#### `([\w.]+)\((.*)\)(?: -> [^`]*)?`$", part, re.MULTILINE)
    return dict(found)


def arguments(function: Any) -> str:
    """The parameters as documents print them: no annotations, no self."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    printed = str(inspect.Signature(parameters))[1:-1]
    return printed.replace("<class 'numpy.uint8'>", "numpy.uint8")


def public(cls: type) -> tuple[set[str], set[str]]:
    """Public attributes and public methods of a class, fields of dataclasses included."""
    own = {name for name in dir(cls) if not name.startswith("_")}
    methods = {name for name in own if callable(getattr(cls, name))}
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return (own - methods) | fields, methods


# --- Python as printed ---


def python_blocks() -> Iterator[Any]:
    for page in PAGES:
        for number, block in enumerate(blocks(page, "python")):
            yield pytest.param(block, id=f"{page.stem}-{number}")


@pytest.mark.parametrize("block", list(python_blocks()))
def test_python_block_runs_as_printed(block: str, tmp_path: Path) -> None:
    """In an empty folder, in a new interpreter, with warnings as errors."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_readme_starts_in_two_commands_and_ten_lines() -> None:
    """The start is short, and its Python is there."""
    start = section(README, "## Start")
    commands = re.findall(r"^```sh\n(.*?)^```", start, re.DOTALL | re.MULTILINE)[0].splitlines()
    assert [command.split("#")[0].strip() for command in commands] == ["make bench", "make test"]
    (program,) = blocks(README, "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 10


# --- the Python reference ---


def test_every_public_name_is_in_the_reference() -> None:
    """Each name of kvio.__all__ and of the public modules appears in code style."""
    modules = (kvio, kvio.devices, kvio.diagnose, kvio.uring, kvio.testing)
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`|^#+ .*", text(PYTHON), re.M))))
    missing = {
        f"{module.__name__}.{name}"
        for module in modules
        for name in module.__all__
        if name not in words
    }
    assert not missing


@pytest.mark.parametrize(
    "cls",
    [
        kvio.Volume,
        kvio.Batch,
        kvio.BufferPool,
        kvio.Buffer,
        kvio.VolumeStats,
        kvio.MemberStats,
        kvio.OpStats,
        kvio.Histogram,
    ],
    ids=lambda cls: cls.__name__,
)
def test_methods_are_documented_with_their_signatures(cls: type) -> None:
    """Each public method has a heading with its arguments and defaults, and no other has."""
    written = {
        name.partition(".")[2]: args
        for name, args in signatures(text(PYTHON)).items()
        if name.startswith(f"{cls.__name__}.")
    }
    assert written == {name: arguments(getattr(cls, name)) for name in public(cls)[1]}


@pytest.mark.parametrize(
    ("heading", "cls"),
    [
        ("#### Attributes of a volume", kvio.Volume),
        ("## Member", kvio.Member),
        ("## BufferPool", kvio.BufferPool),
        ("## Buffer", kvio.Buffer),
        ("### MemberStats", kvio.MemberStats),
        ("### OpStats", kvio.OpStats),
        ("### Histogram", kvio.Histogram),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_attributes_are_documented(heading: str, cls: type) -> None:
    """The table has exactly the public attributes."""
    assert table(section(PYTHON, heading), "name") == public(cls)[0]


def test_volume_stats_are_documented() -> None:
    """The table of counters has exactly the fields."""
    assert table(section(PYTHON, "### VolumeStats"), "name") == public(kvio.VolumeStats)[0]


def test_open_arguments_are_documented() -> None:
    """The table of Volume.open has exactly its parameters."""
    parameters = set(inspect.signature(kvio.Volume.open).parameters)
    assert table(text(PYTHON), "argument") == parameters


def test_capabilities_are_documented() -> None:
    """The table has exactly the keys of a volume's capabilities."""
    with kvio.Volume.open(["/dev/zero"]) as vol:
        keys = set(vol.capabilities)
    assert table(section(PYTHON, "#### Attributes of a volume"), "key") == keys


@pytest.mark.parametrize(
    "name",
    [
        "devices.discover",
        "devices.describe",
        "diagnose.diagnose",
        "uring.Ring",
        "testing.LoopDevices",
        "testing.LoopDevice",
        "testing.throttle",
    ],
)
def test_functions_are_documented_with_their_signatures(name: str) -> None:
    """As for methods; the pool's constructor is checked below."""
    module, _, function = name.partition(".")
    target = getattr(getattr(kvio, module), function)
    assert signatures(text(PYTHON))[f"kvio.{name}"] == arguments(target)


def test_pool_constructor_is_documented() -> None:
    """BufferPool(...) is a class and a signature."""
    assert signatures(text(PYTHON))["BufferPool"] == arguments(kvio.BufferPool.__init__)


@pytest.mark.parametrize(
    "cls",
    [kvio.devices.Namespace, kvio.devices.Path, kvio.devices.Queue, kvio.devices.Verdict],
    ids=lambda cls: cls.__name__,
)
def test_device_values_are_documented(cls: type) -> None:
    """Every field and property of what kvio.devices returns is named."""
    words = set(re.findall(r"`([\w]+)(?:\(\))?`", section(PYTHON, "## kvio.devices")))
    attributes, methods = public(cls)
    assert (attributes | methods) - words == set()


def test_ring_is_documented() -> None:
    """Every public name of Ring is in its table, and every name of the table is one of Ring."""
    part = section(PYTHON, "## kvio.uring").partition("methods and attributes of `Ring`")[2]
    rows = part.partition("\n\n")[0].splitlines()[2:]
    written = {name for row in rows for name in re.findall(r"`(\w+)", row.split("|")[1])}
    assert written == set().union(*public(kvio.uring.Ring))


def test_errors_are_documented() -> None:
    """Attributes, subclasses with their errno, and error classes are those of the code."""
    part = section(PYTHON, "## Errors")
    mine = set(kvio.KvioError.__annotations__)
    assert mine <= table(part, "name")
    subclasses = {name for name in kvio.errors.__all__ if name[0].isupper()} - {"KvioError"}
    assert table(part, "class") == subclasses
    base = (REPOSITORY / "csrc" / "base.c").read_text()
    names = set(re.findall(r'\[KVIO_CLASS_\w+\] = "(\w+)"', base)) - {"none"}
    assert table(part, "value of `error_class`") == names


def test_reasons_not_to_write_are_documented() -> None:
    """The table in safety.md has the words of kvio.devices, and which of them nothing overrides."""
    rows = [
        line.split("|")[1:4]
        for line in section(
            REPOSITORY / "docs" / "safety.md", "## What is refused for writing"
        ).splitlines()
        if line.startswith("| `")
    ]
    never = {row[0].strip(" `") for row in rows if row[2].strip() == "no"}
    overridden = {row[0].strip(" `") for row in rows if row[2].strip() == "overrides"}
    assert never == kvio.devices._NEVER
    assert never | overridden == set(kvio.devices._REASONS)


# --- links, commands, functions ---


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@each_page
def test_links_resolve(page: Path) -> None:
    """Links within the repository lead to a file, and to a heading where they name one."""
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    assert not wrong


@cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):.*## ", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


@each_page
def test_make_targets_exist(page: Path) -> None:
    """Every `make something` in code style is a target that `make help` lists."""
    code = "\n".join(re.findall(r"`([^`\n]+)`", prose(page)) + blocks(page, "sh"))
    named = set(re.findall(r"^(?:[A-Z]+=\S+ |[A-Z]+=\"[^\"]*\" )*make ([a-z]+)", code, re.M))
    assert named <= make_targets()
    if page == README:
        assert {"bench", "test"} <= named


@cache
def help_options(command: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvio", command, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {word.replace("-", "_") for word in re.findall(r"--([a-z][a-z_-]*)", done.stdout)}


def is_option(command: str, word: str) -> bool:
    name = word.replace("-", "_")
    if command == "bench":
        name = options.canonical(word)
        return name in options.OPTIONS or name in help_options("bench")
    return name in help_options(command)


@each_page
def test_options_in_command_lines_exist(page: Path) -> None:
    """Every `kvio bench|tune|info|doctor` line uses a command's own options."""
    code = re.findall(r"`([^`\n]+)`", prose(page)) + [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    wrong = []
    for line in code:
        found = re.match(r"(?:\S*/|python -m )?kvio (\w+)\b(.*)", line)
        if found:
            assert found[1] in ("bench", "tune", "info", "doctor"), line
            words = re.findall(r"(?:^|\s)--([a-z][a-z_-]*)", found[2])
            wrong += [f"{found[1]} --{word}" for word in words if not is_option(found[1], word)]
    assert not wrong


FOREIGN = {"benchmark-only", "force", "inplace", "ulimit"}  # pytest's, setup.py's, docker's


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "cli"], ids=lambda path: path.stem
)
def test_options_in_running_text_exist(page: Path) -> None:
    """An option named alone is one of some command. (cli.md has fio's options, and a test.)"""
    code = " ".join(re.findall(r"`([^`\n]+)`", prose(page)))
    named = set(re.findall(r"(?:^|[\s=])--([a-z][a-z_-]*)", code))
    commands = ("bench", "tune", "info", "doctor")
    unknown = {word for word in named if not any(is_option(c, word) for c in commands)}
    assert unknown <= FOREIGN


def test_functions_named_in_internals_exist() -> None:
    """Every name() of internals.md is a function or method of the sources, C, Cython or Python."""
    sources = [*REPOSITORY.glob("csrc/*.[ch]"), *REPOSITORY.glob("kvio/*.py")]
    code = "\n".join(path.read_text() for path in [*sources, REPOSITORY / "kvio" / "_core.pyx"])
    page = text(REPOSITORY / "docs" / "internals.md")
    foreign = {"io_uring_queue_exit", "stats", "to_dict"}
    named = set(re.findall(r"\b([a-z_]\w+)\(\)", page)) - foreign
    assert len(named) > 50
    missing = {name for name in named if not re.search(rf"\b{name}\(", code)}
    assert not missing


def test_files_named_in_internals_exist() -> None:
    """The layer diagram and the text name files that are there."""
    page = text(REPOSITORY / "docs" / "internals.md")
    here = {path.name for folder in ("csrc", "kvio") for path in (REPOSITORY / folder).iterdir()}
    named = set(re.findall(r"\b(\w+\.(?:c|h|pyx))\b", page))
    assert {"volume.c", "lane.c", "ring.c"} <= named
    assert named <= here


@each_page
def test_pages_say_nothing_of_this_machine(page: Path) -> None:
    """No home folders and no placeholders."""
    found = re.findall(r"/(?:home|root|work)/\S*|\b(?:TODO|TBD|FIXME|XXX)\b", text(page))
    assert not found
