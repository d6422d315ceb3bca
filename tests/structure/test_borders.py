"""The borders that an include or an import does not show: what bindings bind, where the public
functions live, state hidden in functions, and private names in the command line. Each check has
mutants: small trees that break its rule."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.structure import rules

ROOT = Path(__file__).resolve().parents[2]

# Whose functions kvio.h declares: the first word after kvio_, and the unit that defines it.
PUBLIC = {
    "volume": "volume",
    "batch": "batch",
    "notifier": "batch",
    "memory": "bufpool",
    "hist": "hist",
    "error": "base",
    "inspect": "inspect",
    "verdict": "inspect",
}


def wrong_bindings(root: Path) -> list[str]:
    """Cython sees kvio.h and the system's headers."""
    return [
        f"{path.name} binds {name}"
        for path in sorted((root / "kvio").rglob("*.p[yx][xd]"))
        for name in re.findall(r'cdef extern from "([^"]+)"', path.read_text())
        if name not in ("kvio.h", "Python.h") and not name.startswith("<")
    ]


def wrong_definitions(root: Path) -> list[str]:
    """A function of kvio.h is defined once, in the unit that its name says; and no .c file declares
    a function of another, which would go round the headers."""
    header = re.sub(r"/\*.*?\*/", "", (root / "csrc/kvio.h").read_text(), flags=re.DOTALL)
    declared = re.findall(r"^[a-z][^;{}=]*?\b(kvio_\w+)\s*\(", header, re.MULTILINE)
    where: dict[str, list[str]] = {name: [] for name in declared}
    wrong = [] if where else ["kvio.h declares nothing"]
    for path in sorted((root / "csrc").glob("*.c")):
        for name, _ in rules.c_functions(path):
            if name in where:
                where[name].append(rules.PART_OF.get(path.stem, path.stem))
        if re.search(r"^\s*extern\b", path.read_text(), re.MULTILINE):
            wrong.append(f"{path.name} declares something extern")
    for name, found in where.items():
        expected = PUBLIC.get(name.split("_")[1])
        if found != [expected]:
            places = " and ".join(found) or "nowhere"
            wrong.append(f"{name} is defined {places}, expected in {expected}")
    return wrong


def state_of(source: Path, folder: Path) -> list[tuple[str, str]]:
    """(file, variable) of what the compiler puts into a writable section, wherever it stands."""
    built = folder / f"{source.stem}.o"
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O0", "-fPIC", "-w", "-c", source, "-o", built]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    table = subprocess.run(
        ["objdump", "-t", built], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    found = []
    for line in table.splitlines():
        match = re.search(r"\s(\.\S+|\*COM\*)\t[0-9a-f]+\s+(?:\.hidden )?(\S+)$", line)
        # .data.rel.ro holds constants that have addresses in them
        if match and re.match(r"\.(data|bss|tdata|tbss)(?!\.rel\.ro)|\*COM\*", match[1]):
            # a static of a function gets a number; a section's own symbol is no variable
            name = match[2].partition(".")[0]
            found += [(source.name, name)] if name else []
    return found


def all_state(root: Path, folder: Path) -> set[tuple[str, str]]:
    sources = sorted((root / "csrc").glob("*.c"))
    with ThreadPoolExecutor(2) as pool:
        return {hit for hits in pool.map(lambda s: state_of(s, folder), sources) for hit in hits}


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def wrong_names(root: Path) -> list[str]:
    """The command line takes no private name from a module, and no private attribute of an object
    but its own, which it reaches through self and cls. The two names of Python's have no other."""
    pythons = {("os", "_exit"), ("argparse", "_SubParsersAction")}
    wrong = []
    for path in sorted((root / "kvio/cli").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                for name in [f"{module}.{alias.name}" for alias in node.names]:
                    if "kvio" in name and any(map(private, name.split("."))):
                        wrong.append(f"{path.name}:{node.lineno} imports {name.lstrip('.')}")
            elif isinstance(node, ast.Attribute) and private(node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else "an expression"
                if owner not in ("self", "cls") and (owner, node.attr) not in pythons:
                    wrong.append(f"{path.name}:{node.lineno} uses {owner}.{node.attr}")
    return wrong


def test_bindings_see_the_public_header_only() -> None:
    assert wrong_bindings(ROOT) == []


def test_public_functions_are_defined_where_their_names_say() -> None:
    assert wrong_definitions(ROOT) == []


def test_compiled_core_holds_no_state_but_the_named(tmp_path: Path) -> None:
    assert all_state(ROOT, tmp_path) == set(rules.GLOBALS)


def test_command_line_uses_public_names_only() -> None:
    assert wrong_names(ROOT) == []


# --- mutants ---

CLEAN = {
    "csrc/kvio.h": "/* int kvio_gone(int); */\nint kvio_volume_open(int);\n",
    "csrc/volume.c": "\nint kvio_volume_open(int n)\n{\n  return n;\n}\n",
    "kvio/_ckvio.pxd": 'cdef extern from "kvio.h" nogil:\n  pass\n',
    "kvio/cli/bench.py": "import os\nfrom kvio import __version__\nself._x = os._exit\n",
}
MUTANTS = [
    (wrong_bindings, "kvio/_core.pyx", 'cdef extern from "lane.h":\n  pass\n', "binds lane.h"),
    (wrong_definitions, "csrc/volume.c", "int x;\n", "kvio_volume_open is defined nowhere"),
    (
        wrong_definitions,
        "csrc/lane.c",
        "\nint kvio_volume_open(int n)\n{\n  return n;\n}\n",
        "kvio_volume_open is defined lane and volume",
    ),
    (wrong_definitions, "csrc/lane.c", "extern int kvio_x(int);\n", "something extern"),
    (wrong_definitions, "csrc/kvio.h", "\n", "declares nothing"),
    (wrong_names, "kvio/cli/bench.py", "from kvio import _core\n", "imports kvio._core"),
    (wrong_names, "kvio/cli/bench.py", "import kvio._core as c\n", "imports kvio._core"),
    (wrong_names, "kvio/cli/bench.py", "from kvio.stats import _x\n", "imports kvio.stats._x"),
    (wrong_names, "kvio/cli/bench.py", "vol._ring\n", "vol._ring"),
    (wrong_names, "kvio/cli/bench.py", "vol().x._ring\n", "an expression._ring"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in CLEAN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(("check", "file", "text", "finding"), MUTANTS)
def test_checks_find_the_mutant_and_nothing_before(
    check: Callable[[Path], list[str]], file: str, text: str, finding: str, tree: Path
) -> None:
    assert check(tree) == []
    (tree / file).write_text(text)
    assert any(finding in line for line in check(tree)), check(tree)


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("int counter;", True),
        ("static int counter = 3;\nint *f(void) { return &counter; }", True),
        ("int f(void) { static int counter; return counter++; }", True),
        ("static _Thread_local int counter;\nint *f(void) { return &counter; }", True),
        ("static const char *counter[] = {0};\nconst char **f(void) { return counter; }", True),
        ('static const char *const t[] = {"x"};\nconst char *f(int n) { return t[n]; }', False),
        ("int f(void) { return 0; }", False),
    ],
)
def test_state_check_tells_variables_from_constants(
    text: str, caught: bool, tmp_path: Path
) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/lane.c").write_text(text)
    assert all_state(tmp_path, tmp_path) == ({("lane.c", "counter")} if caught else set())
