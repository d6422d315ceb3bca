"""A zram device: a block device whose I/O the kernel hands to its io-wq threads."""

import contextlib
import time
from pathlib import Path

_CONTROL = Path("/sys/class/zram-control")


def unavailable():
    """Why there can be no zram device here, or None."""
    return None if _CONTROL.exists() else "the kernel has no zram (modprobe zram)"


@contextlib.contextmanager
def zram_device(size_bytes):
    """A new zram device of that size; gives its path, and removes it at the end."""
    number = int((_CONTROL / "hot_add").read_text())
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text(str(size_bytes))
        yield f"/dev/zram{number}"
    finally:
        for attempt in range(100):
            try:
                Path(f"/sys/block/zram{number}/reset").write_text("1")
                (_CONTROL / "hot_remove").write_text(str(number))
                break
            except OSError:  # EBUSY while somebody has it open
                if attempt == 99:
                    raise
                time.sleep(0.05)
