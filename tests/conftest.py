"""Fixtures of the whole suite, and the count of skips that CI insists on.

A skip is a result: it carries its reason, and `tests/expected_skips.txt` lists those that a machine
of CI's kind must show. With --expected-skips=SECTION the run fails when others are skipped, or when
one of these is not; without it they are only printed.
"""

from __future__ import annotations

import fnmatch
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvio.testing import LoopDevices
from tests.support import images
from tests.support import zram as zram_support
from tests.support.faultdev import FaultDevice

MIB = 1 << 20
EXPECTED_SKIPS = Path(__file__).with_name("expected_skips.txt")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--expected-skips",
        metavar="SECTION",
        help="fail unless exactly the tests of this section of tests/expected_skips.txt skip",
    )


# --- skips ---


def read_expected(path: Path, section: str) -> list[str]:
    """The patterns of one section; a line is `node id # reason`, with * and ? as wildcards."""
    patterns, current = [], None
    for line in path.read_text().splitlines():
        text = line.partition(" #")[0].strip()
        if text.startswith("[") and text.endswith("]") and "::" not in text:
            current = text[1:-1]
        elif text and not text.startswith("#") and current == section:
            patterns.append(text)
    return patterns


def compare_skips(skipped: list[str], patterns: list[str]) -> list[str]:
    """What is wrong: skips that no pattern names, and patterns that no skip matches."""

    def match(node: str, pattern: str) -> bool:
        return node == pattern or fnmatch.fnmatchcase(node, pattern.replace("[", "[[]"))

    wrong = [
        f"skipped, not expected: {node}"
        for node in skipped
        if not any(match(node, pattern) for pattern in patterns)
    ]
    return wrong + [
        f"expected to skip, did not: {pattern}"
        for pattern in patterns
        if not any(match(node, pattern) for node in skipped)
    ]


class SkipCount:
    def __init__(self, section: str) -> None:
        self.section = section
        self.wrong: list[str] = []
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.wrong = compare_skips(self.skipped, read_expected(EXPECTED_SKIPS, self.section))
        if self.wrong and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.wrong:
            terminalreporter.section(f"skips against [{self.section}] of {EXPECTED_SKIPS.name}")
            for line in self.wrong:
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    section = config.getoption("--expected-skips")
    if section:
        config.pluginmanager.register(SkipCount(section), "kvio-skip-count")
    check_sanitized()
    # A shell ignores SIGINT for what it starts in the background, and children inherit that: the
    # tests of Ctrl-C would wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check_sanitized() -> None:
    """A sanitizer run that loads the plain build would find nothing and say so proudly."""
    expected = os.environ.get("KVIO_EXPECT_SANITIZED")
    if not expected:
        return
    import kvio._core

    loaded = Path(kvio._core.__file__).resolve()
    if not loaded.is_relative_to(Path(expected).resolve()):
        raise pytest.UsageError(f"kvio._core comes from {loaded}, not from {expected}")
    if b"__asan_init" not in loaded.read_bytes():
        raise pytest.UsageError(f"{loaded} was built without AddressSanitizer")
    # this process looks for leaks at its end; the programs that tests start (compilers, mkfs) leak,
    # and some children may start no thread more, which LeakSanitizer would need
    os.environ["ASAN_OPTIONS"] = f"{os.environ.get('ASAN_OPTIONS', '')}:detect_leaks=0"


# --- what the machine offers ---


def why_not_root() -> str | None:
    if os.geteuid() != 0:
        return "needs root (loop devices, mounts, control groups)"
    return None


def why_no_loop() -> str | None:
    reason = why_not_root()
    if reason is None and not os.path.exists("/dev/loop-control"):
        reason = "the kernel has no loop driver (modprobe loop)"
    return reason


def why_no_fuse() -> str | None:
    reason = why_no_loop()
    if reason is None and not os.path.exists("/dev/fuse"):
        reason = "the kernel has no FUSE (modprobe fuse)"
    return reason


def skip_when(reason: str | None) -> None:
    if reason:
        pytest.skip(reason)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root"):
        skip_when(why_not_root())


@pytest.fixture
def require_root() -> None:
    """Skips, with the reason, when the tests do not run as root."""
    skip_when(why_not_root())


@pytest.fixture
def loops() -> Iterator[list[str]]:
    """Four loop devices of 64 MiB with direct I/O over memory (sector 512): their paths."""
    skip_when(why_no_loop())
    with LoopDevices(4, 64 * MIB) as devices:
        yield devices.paths


@pytest.fixture
def loops_4k() -> Iterator[list[str]]:
    """The same with 4096-byte sectors."""
    skip_when(why_no_loop())
    with LoopDevices(4, 64 * MIB, sector=4096) as devices:
        yield devices.paths


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Four preallocated files of 64 MiB on whatever the temporary folder lies on: their paths."""
    paths = [tmp_path / f"member-{index}" for index in range(4)]
    for path in paths:
        with open(path, "wb") as out:
            os.posix_fallocate(out.fileno(), 0, 64 * MIB)
    return [str(path) for path in paths]


@pytest.fixture
def fault_device() -> Iterator[FaultDevice]:
    """A disk of 64 MiB that fails, stalls and records on request (support.faultdev)."""
    skip_when(why_no_fuse())
    with FaultDevice(64 * MIB) as device:
        yield device


@pytest.fixture
def fault_file() -> Iterator[FaultDevice]:
    """The same as a file only (`.path`), so that short transfers show."""
    reason = why_not_root()
    if reason is None and not os.path.exists("/dev/fuse"):
        reason = "the kernel has no FUSE (modprobe fuse)"
    skip_when(reason)
    with FaultDevice(64 * MIB, loop=False) as device:
        yield device


@pytest.fixture
def ext4_folder() -> Iterator[Path]:
    """A new ext4 of 512 MiB."""
    skip_when(why_no_loop())
    with images.mounted("ext4", size_bytes=512 * MIB) as folder:
        yield folder


@pytest.fixture
def xfs_folder() -> Iterator[Path]:
    """A new xfs of 512 MiB."""
    skip_when(why_no_loop())
    with images.mounted("xfs", size_bytes=512 * MIB) as folder:
        yield folder


@pytest.fixture
def tmpfs_folder() -> Iterator[Path]:
    """A tmpfs of 64 MiB."""
    skip_when(why_not_root())
    with images.mounted("tmpfs", size_bytes=64 * MIB) as folder:
        yield folder


@pytest.fixture
def zram() -> Iterator[str]:
    """A zram device of 256 MiB: its path."""
    skip_when(why_not_root() or zram_support.unavailable())
    with zram_support.zram_device(256 * MIB) as path:
        yield path


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails when the test leaves more file descriptors or threads than it found."""
    before = _descriptors(), _threads()
    yield
    after = _descriptors(), _threads()
    assert after[0] <= before[0], f"file descriptors: {before[0]} before, {after[0]} after"
    assert after[1] <= before[1], f"threads: {before[1]} before, {after[1]} after"


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def memlock_soft() -> Iterator[int]:
    """The soft RLIMIT_MEMLOCK in bytes, put back after a test that changes it."""
    limits = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield limits[0]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, limits)
