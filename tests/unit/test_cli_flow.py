"""Which results of a batch are good: blocks of the wrong size, short ones and failed ones."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvio.cli.flow import Check, Flow
from kvio.cli.main import main
from kvio.cli.offsets import make_stream, parse_distribution
from kvio.cli.plan import READ, Budget, OneWay
from kvio.cli.verify import Headers

BLOCK = 4096


class Answers:
    """A batch whose results are known beforehand, and the volume that gives it."""

    def __init__(self, results: dict[int, int], headers: Headers, memory: np.ndarray) -> None:
        self.results, self.headers, self.memory = results, headers, memory
        self.submitted = 0

    def submit_read(self, offsets: Any, memory: Any) -> Answers:
        self.submitted += len(offsets)
        self.asked, self.lengths = offsets.tolist(), memory[1]
        for i, offset in enumerate(self.asked):
            self.headers.fill(self.piece(0, i, BLOCK), offset)
        return self

    def wait(self, timeout: float | None = None) -> Any:
        del timeout
        return np.array([self.results.get(at, BLOCK) for at in self.asked], np.int64)

    def errors(self) -> list[Exception]:
        return [OSError(errno.EIO, "broken")]

    def addresses(self, slot: int, direction: int, count: int) -> Any:
        del slot, direction
        return np.zeros(count, np.uint64)

    def piece(self, slot: int, index: int, size: int) -> Any:
        del slot
        return self.memory[index * BLOCK : index * BLOCK + size]


def run(results: dict[int, int], *, blocks: int = 8, batch: int = 4, check: bool = False) -> Flow:
    headers = Headers("crc32", BLOCK, 1)
    volume = Answers(results, headers, np.zeros(batch * BLOCK, np.uint8))
    flow = Flow(
        volume, volume, (BLOCK, BLOCK), slots=1, largest_batch=batch,  # type: ignore[arg-type]
        keep_going=(False, False), tick=lambda now: False, tick_s=10,
    )  # fmt: skip
    stream = make_stream(start=0, length=blocks * BLOCK, block_size=BLOCK, random=False,
                         distribution=parse_distribution("random", 1024), norandommap=False,
                         seed=1)  # fmt: skip
    plan = OneWay(stream, READ, BLOCK, Budget(blocks * BLOCK, None), (batch, batch))
    flow.run(plan, check=Check(headers, True, True, False) if check else None)
    return flow


def test_a_short_block_is_a_bad_block() -> None:
    good = run({}, check=True)
    assert (good.verified, good.bad_count, good.error) == (8, 0, 0)
    flow = run({BLOCK: 512}, check=True)
    assert (flow.verified, flow.bad_count) == (4 if flow.stopped else 8, 1)
    assert "only 512 of its 4096 bytes" in str(flow.bad[0])
    assert flow.error


def bench(folder: Path, *words: str, code: int = 0) -> dict[str, Any]:
    with contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()) as said:
        found = main(["bench", *words, "--output-format=json", "--output=out.json"])
    assert found == code, said.getvalue()
    return json.loads((folder / "out.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("extra", [[], ["--rate=64m"], ["--rw=randwrite", "--iodepth=8"]])
def test_what_is_checked_are_the_blocks_that_were_written(tmp_path: Path, extra: list[str]) -> None:
    words = ["--filename=m", "--size=1m", "--rw=write", "--bs=4k,64k", "--verify=crc32", *extra]
    assert bench(tmp_path, *words)["kvio"]["jobs"][0]["verify"] == {"checked": 16, "bad": 0}
    found = bench(tmp_path, *words, "--verify_only")
    assert found["kvio"]["jobs"][0]["verify"] == {"checked": 16, "bad": 0}
    assert found["jobs"][0]["read"]["io_bytes"] == 1 << 20
    fd = os.open(tmp_path / "m", os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, 40_000)[0] ^ 1]), 40_000)
    os.close(fd)
    found = bench(tmp_path, *words, "--verify_only", code=1)
    assert found["kvio"]["jobs"][0]["verify"] == {"checked": 16, "bad": 1}


def test_written_blocks_are_read_back_whole(tmp_path: Path) -> None:
    words = ["--filename=m", "--size=1m", "--rw=write", "--bs=4k,64k", "--verify=crc32"]
    assert bench(tmp_path, *words)["jobs"][0]["read"]["io_bytes"] == 1 << 20
