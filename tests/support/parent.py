"""When a helper process should end: with its parent."""

import errno
import os
import signal


class Parent:
    """The process that this one must not outlive.

    A killed process whose thread sits in a stalled read cannot end before the read does, so its end
    of the control socket stays open and its pidfd silent: it waits for us and we would wait for it.
    What shows meanwhile is a main thread that is a zombie, or that has SIGKILL pending.
    """

    def __init__(self, pid):
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)  # ProcessLookupError: gone already
        if os.getppid() != pid:
            os.close(self.pidfd)
            raise ProcessLookupError(errno.ESRCH, "the parent ended first", str(pid))

    def is_ending(self):
        if os.getppid() != self.pid:
            return True
        try:
            with open(f"/proc/{self.pid}/status") as lines:
                status = dict(line.split(":", 1) for line in lines)
        except (FileNotFoundError, ProcessLookupError):
            return True
        pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
        return status["State"].split()[0] in "ZX" or bool(pending >> (signal.SIGKILL - 1) & 1)
