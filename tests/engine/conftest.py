"""Fixtures of the engine's tests: devices, seeds, and a check that every test leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvio
from kvio.testing import LoopDevices
from tests.engine.lib import MIB, descriptors, native_threads, wait_until
from tests.support.faultdev import FaultDevice

Opener = Callable[..., kvio.Volume]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "stress: random mixed traffic with verification; KVIO_STRESS_SECONDS says how long",
    )


@pytest.fixture
def seed() -> int:
    """Printed; KVIO_TEST_SEED repeats a run."""
    value = int(os.environ.get("KVIO_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"seed: KVIO_TEST_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """No descriptor and no thread outlives a test."""
    gc.collect()
    fds, threads = descriptors(), native_threads()
    yield
    gc.collect()
    wait_until(lambda: native_threads() <= threads, "the threads that the test started end")
    new = {fd: name for fd, name in descriptors().items() if fd not in fds}
    assert not new, f"descriptors left open: {new}"


@pytest.fixture
def make_loops(require_root: None) -> Iterator[Callable[..., list[str]]]:
    """make_loops(n, size_bytes, sector=512) -> paths of new block devices over memory."""
    with contextlib.ExitStack() as stack:

        def make(n: int, size_bytes: int = 8 * MIB, sector: int = 512) -> list[str]:
            return stack.enter_context(LoopDevices(n, size_bytes, sector)).paths

        yield make


@pytest.fixture
def disk(require_root: None) -> Iterator[FaultDevice]:
    """A block device of 16 MiB that misbehaves on request. The block layer merges no requests, so
    that a fault meets the one it was made for."""
    with FaultDevice(16 * MIB) as device:
        queue = Path("/sys/block", Path(device.device).name, "queue")
        (queue / "nomerges").write_text("2")
        try:
            yield device
        finally:
            (queue / "nomerges").write_text("0")


@pytest.fixture
def make_files(tmp_path: Path) -> Callable[..., list[str]]:
    """make_files(n, size_bytes) -> paths of preallocated files."""

    def make(n: int, size_bytes: int = 4 * MIB) -> list[str]:
        return kvio.Volume.create(
            [tmp_path / f"member{i}" for i in range(n)], size_bytes=size_bytes
        )

    return make


@pytest.fixture
def opened(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Volume.open with mode="rw", direct="prefer"; closed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def make(members: Any, **options: Any) -> kvio.Volume:
            options = {"mode": "rw", "direct": "prefer", **options}
            return stack.enter_context(kvio.Volume.open(members, **options))

        yield make
        if "disk" in request.fixturenames:  # a test that failed must not wait for its own stall
            request.getfixturevalue("disk").clear()
