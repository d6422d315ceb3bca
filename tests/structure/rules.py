"""The rules of the house, as functions from a source tree to a list of what breaks them."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

# What a C unit may include, besides itself: the table of docs/internals.md, lowest first. A header
# and its .c are one unit; batch is written in three files, volume in four.
UNITS: dict[str, set[str]] = {
    "base": {"kvio"},
    "hist": {"base"},
    "layout": {"base"},
    "sysfs": {"base"},
    "signature": {"base"},
    "nvme": {"base"},
    "ring": {"base"},
    "safety": {"base", "signature", "sysfs"},
    "probe": {"base", "sysfs"},
    "device": {"base", "sysfs", "nvme", "probe", "safety"},
    "bufpool": {"ring"},
    "shared": {"bufpool", "device", "hist", "layout"},
    "batch": {"base", "shared"},
    "quarantine": {"batch"},
    "lane": {"quarantine", "nvme"},
    "iothreads": {"batch"},
    "worker": {"lane", "iothreads"},
    "caller": {"lane"},
    "volume": {"caller", "iothreads", "worker"},
    "inspect": {"device", "safety"},
}
PART_OF = {
    "batch_cut": "batch",
    "notify": "batch",
    "volume_open": "volume",
    "volume_info": "volume",
}

# What a Python module of kvio may import of kvio. A name with a dot at its end is a package.
MODULES: dict[str, set[str]] = {
    "errors": set(),
    "_checks": set(),
    "_sysfs": set(),
    "_namespace": set(),
    "members": set(),
    "testing": set(),
    "stats": {"_core"},
    "files": {"errors"},
    "batch": {"_core"},
    "pool": {"_core", "_checks", "errors"},
    "core": {"_core", "_checks", "batch", "errors", "files", "members", "pool", "stats"},
    "devices": {"_core", "_namespace", "_sysfs"},
    "uring.": {"uring."},
    "diagnose.": {"diagnose.", "uring.", "devices", "_core"},
    "__init__": {"core", "errors", "stats"},
    "__main__": {"cli."},
    # the command line stands on what every user has
    "cli.": {"cli.", "__init__", "devices", "diagnose.", "uring.", "testing"},
}

C_LINES, C_FUNCTION_LINES, PYTHON_LINES = 600, 70, 400
LARGER = {
    "kvio/_core.pyx": (1100, "one border between Python and C: Cython gains nothing from two"),
    "tests/unit/test_docs.py": (450, "one check of the documents for each kind of statement"),
}

# Mutable state of the C core outside of objects, with the reason.
GLOBALS = {
    ("base.c", "fork_generation"): "grows in a forked child, so that objects know they are stale",
    ("caller.c", "tls_callers"): "each thread's list of its own entries",
    ("caller.c", "exit_key"): "cleans that list up at the thread's end",
    ("caller.c", "exit_once"): "makes the key once",
}


def _unit(name: str) -> str:
    return PART_OF.get(name, name)


def c_layers(csrc: Path) -> list[str]:
    """Includes that go up or sideways, and liburing anywhere but in ring.c."""
    broken = []
    for path in sorted(csrc.glob("*.[ch]")):
        unit = _unit(path.stem)
        if path.name == "kvio.h":
            allowed: set[str] = set()
        elif unit not in UNITS:
            broken.append(f"{path.name}: in no layer; give it a place in UNITS")
            continue
        else:
            allowed = UNITS[unit] | {unit}
        text = path.read_text()
        for name in re.findall(r'^\s*#\s*include\s+"(\w+)\.h"', text, re.MULTILINE):
            if _unit(name) not in allowed:
                broken.append(f"{path.name} includes {name}.h")
        if path.name != "ring.c" and re.search(r"#\s*include\s+[<\"]liburing", text):
            broken.append(f"{path.name} includes liburing: only ring.c may")
    return broken


_GLOBAL = re.compile(
    r"^(?!typedef|extern|struct \w+;|enum)(?:static\s+)?(?:_Thread_local\s+)?[A-Za-z_][\w\s*]*?"
    r"\b(\w+)(?:\[[^\]]*\])*\s*(?:=[^;{]*)?;\s*$",
    re.MULTILINE,
)


def c_globals(csrc: Path) -> list[str]:
    """Variables at file scope that can change."""
    broken = []
    for path in sorted(csrc.glob("*.c")):
        for match in _GLOBAL.finditer(path.read_text()):
            line = match[0].strip()
            if "(" in line or re.match(r"(static\s+)?const\b", line) or "*const " in line:
                continue
            if (path.name, match[1]) not in GLOBALS:
                broken.append(f"{path.name}: mutable global: {line}")
    return broken


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return f"{parts[0]}." if len(parts) > 1 else parts[0]


def _target(dotted: str, package: Path) -> str:
    parts = dotted.split(".")[1:]
    if not parts:
        return "__init__"
    return f"{parts[0]}." if (package / parts[0]).is_dir() else parts[0]


def _imports(path: Path, package: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {
                _target(a.name, package) for a in node.names if a.name.split(".")[0] == "kvio"
            }
        elif isinstance(node, ast.ImportFrom) and node.module == "kvio":
            for alias in node.names:
                name = alias.name
                inner = (package / name).is_dir() or (package / f"{name}.py").exists()
                inner = inner or name == "_core"
                found.add(_target(f"kvio.{name}", package) if inner else "__init__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvio."):
            found.add(_target(str(node.module), package))
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add(f"relative import of {node.module}")
    return found


def python_layers(package: Path) -> list[str]:
    """Imports that go up or sideways."""
    broken = []
    for path in sorted(package.rglob("*.py")):
        module = _module(path, package)
        if module not in MODULES:
            broken.append(f"{path.name}: in no layer; give it a place in MODULES")
            continue
        for name in sorted(_imports(path, package) - MODULES[module] - {module}):
            broken.append(f"{path.relative_to(package)} imports {name}")
    return broken


def sizes(root: Path) -> list[str]:
    """Files and C functions that are too long to be read at once."""
    broken = []
    for pattern, limit in (("csrc/*.[ch]", C_LINES), ("**/*.py", PYTHON_LINES), ("kvio/*.pyx", 0)):
        for path in sorted(root.glob(pattern)):
            name = str(path.relative_to(root))
            if name.startswith((".", "build/")):
                continue
            lines = len(path.read_text().splitlines())
            most = LARGER[name][0] if name in LARGER else limit
            if lines > most:
                broken.append(f"{name}: {lines} lines, at most {most}")
    for path in sorted(root.glob("csrc/*.c")):
        broken += [
            f"csrc/{path.name}: {name}() has {n} lines, at most {C_FUNCTION_LINES}"
            for name, n in c_functions(path)
            if n > C_FUNCTION_LINES
        ]
    return broken


def c_functions(path: Path) -> list[tuple[str, int]]:
    """Name and lines of each function; the style puts its braces at the start of a line."""
    found, start, name = [], 0, ""
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        if line == "{":
            start = i
            blank = max(k for k in range(i) if not lines[k].strip())
            head = " ".join(lines[blank + 1 : i])
            names = re.findall(r"(\w+)\(", head)
            name = names[0] if names else "?"
        elif line == "}" and start:
            found.append((name, i - start + 1))
            start = 0
    return found


def exports(library: Path) -> list[str]:
    """Symbols that a module gives to the process besides its init function."""
    out = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split()[-1] for line in out.splitlines() if line.strip()]
    init = [name for name in names if re.fullmatch(r"PyInit_\w+|_cffi_pypyinit_\w+", name)]
    broken = [f"{library.name} exports {name}" for name in names if name not in init]
    return broken or ([] if init else [f"{library.name} has no init function"])
