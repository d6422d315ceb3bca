"""Running code as an ordinary user, with that user's limits.

The interpreter may lie where that user cannot look (a home folder of root's). The child then keeps
CAP_DAC_READ_SEARCH and nothing else: it may read any file, and is ordinary in all other respects
(memory limits, mounts, devices for writing). `Outcome.reads_everything` says so, and a test about
permissions on reading must skip on it.
"""

import dataclasses
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str
    reads_everything: bool


def _others_may_enter(path):
    """Whether everybody may pass through each folder on the way to ``path``, and read it."""
    path = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in path.parents) and bool(
        path.stat().st_mode & 0o004
    )


def ordinary_user():
    """The uid and gid of nobody."""
    entry = pwd.getpwnam("nobody")
    return entry.pw_uid, entry.pw_gid


def run_as_user(code, *args, memlock_bytes=None, timeout=60.0, env=None):
    """Runs Python ``code`` as nobody in a new interpreter that can import kvio.

    Parameters
    ----------
    code : str
        Python source; ``sys.argv[1:]`` are ``args``.
    memlock_bytes
        RLIMIT_MEMLOCK, soft and hard; None leaves it as it is.
    timeout
        Seconds; subprocess.TimeoutExpired afterwards.
    env
        Further environment variables.

    Returns
    -------
    Outcome
        With a non-zero returncode too: the test says what it expects.
    """
    uid, gid = ordinary_user()
    readable = all(
        _others_may_enter(path)
        for path in (sys.executable, sysconfig.get_path("stdlib"), _REPOSITORY / "kvio")
    )
    keep = "-all" if readable else "-all,+dac_read_search"
    command = [
        shutil.which("setpriv") or "setpriv",
        f"--reuid={uid}", f"--regid={gid}", "--clear-groups",
        f"--inh-caps={keep}", f"--ambient-caps={keep}", f"--bounding-set={keep}",
        sys.executable, "-c", code, *map(str, args),
    ]  # fmt: skip
    if memlock_bytes is not None:
        command = ["prlimit", f"--memlock={memlock_bytes}:{memlock_bytes}", *command]
    inherited = {name: value for name, value in os.environ.items() if name != "HOME"}
    path = os.pathsep.join([*sys.path[:1], str(_REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd="/",
        check=False,
        env={**inherited, "PYTHONPATH": path.strip(os.pathsep), "HOME": "/", **(env or {})},
    )
    return Outcome(done.returncode, done.stdout, done.stderr, not readable)
