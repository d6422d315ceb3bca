"""The process behind support.faultdev: a FUSE file system with one file that misbehaves on request.

Speaks the kernel's FUSE protocol itself (linux/fuse.h, 7.31 and later): a library in between would
serialise direct I/O (libfuse 2 does not negotiate FUSE_ASYNC_DIO) and block a thread per stall.

Run as `python faultfs.py MOUNTPOINT SIZE_BYTES CONTROL_FD PARENT_PID MAX_STALL_SECONDS`, as root.
Commands come as one JSON object a line through the control socket, each answered by one. End of
file there, or the end of the parent, releases every stall, unmounts and ends the process.

One thread, one loop: a request that shall stall is put aside and answered when it is released, or
after MAX_STALL_SECONDS, whatever happens.
"""

import contextlib
import ctypes
import errno
import json
import mmap
import os
import selectors
import socket
import stat
import struct
import sys
import time
from typing import NamedTuple

from parent import Parent  # beside this script

ROOT_ID, FILE_ID = 1, 2
FILE_NAME = b"disk"
MAX_TRANSFER = 1 << 20

LOOKUP, FORGET, GETATTR, SETATTR = 1, 2, 3, 4
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 14, 15, 16, 17, 18, 20
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, ACCESS = 25, 26, 27, 28, 29, 34
INTERRUPT, DESTROY, BATCH_FORGET = 36, 38, 42
SILENT = {FORGET, BATCH_FORGET, INTERRUPT}

ASYNC_READ, BIG_WRITES, ASYNC_DIO, PARALLEL_DIROPS, MAX_PAGES = (
    1 << 0, 1 << 5, 1 << 15, 1 << 18, 1 << 22,
)  # fmt: skip
FOPEN_DIRECT_IO, FOPEN_PARALLEL_DIRECT_WRITES = 1 << 0, 1 << 6

IN_HEADER = struct.Struct("=IIQQIIIHH")
OUT_HEADER = struct.Struct("=IiQ")
RW_IN = struct.Struct("=QQIIQII")
MNT_DETACH = 2

TICK_SECONDS = 1.0


class Stalled(NamedTuple):
    """A request that was put aside."""

    rule: int
    unique: int
    op: str
    offset: int
    what: object  # the payload of a write, else the length
    until: float  # time.monotonic() at which it goes on by itself

    @property
    def length(self):
        return self.what if isinstance(self.what, int) else len(self.what)


class Rule:
    """One thing that goes wrong: for an operation, in a byte range, so many times."""

    def __init__(self, spec):
        self.id = spec["id"]
        self.kind = spec["kind"]  # fail, short, stall
        self.op = spec["op"]  # read, write, flush
        self.start, self.end = spec["start"], spec["end"]
        self.left = spec["times"]  # None: for ever
        self.value = spec.get("value")  # errno, or the bytes a short transfer keeps
        self.hits = 0

    def matches(self, op, offset, length):
        if op != self.op or self.left == 0:
            return False
        return op == "flush" or (offset < self.end and offset + length > self.start)

    def use(self):
        self.hits += 1
        if self.left is not None:
            self.left -= 1


class FaultFs:
    def __init__(self, mountpoint, size, max_stall_seconds):
        self.mountpoint = mountpoint
        self.max_stall_seconds = max_stall_seconds
        self.data = mmap.mmap(-1, max(size, 1))
        self.size = size
        self.rules = []
        self.hits = {}
        self.stalled = []  # oldest first
        self.recording = None
        self.initial = b""
        self.waiting = None  # (how many stalled, until when) of a client that waits
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"kvio-fault", mountpoint.encode(), b"fuse", 2 | 4, options.encode()):
            raise OSError(ctypes.get_errno(), "mount of the FUSE fault file system", mountpoint)

    # --- the protocol ---

    def reply(self, unique, error=0, payload=b""):
        header = OUT_HEADER.pack(OUT_HEADER.size + len(payload), -error, unique)
        # ENOENT: the kernel has given the request up meanwhile
        with contextlib.suppress(FileNotFoundError):
            os.writev(self.fd, [header, payload])

    def serve_one(self):
        """Answers one request; False when the file system is no more."""
        try:
            request = os.read(self.fd, MAX_TRANSFER + 65536)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return False
            # EAGAIN, EINTR, and ENOENT: the request was given up while we fetched it
            if error.errno not in (errno.EAGAIN, errno.EINTR, errno.ENOENT):
                raise
            return True
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        body = memoryview(request)[IN_HEADER.size :]
        if opcode in SILENT:
            return True
        handler = self.HANDLERS.get(opcode)
        if handler is None:
            self.reply(unique, errno.ENOSYS)
        else:
            handler(self, unique, node, body)
        return True

    def attributes(self, node):
        mode, size = (
            (stat.S_IFDIR | 0o755, 0) if node == ROOT_ID else (stat.S_IFREG | 0o666, self.size)
        )
        return struct.pack(
            "=6Q 10I", node, size, (size + 511) // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )

    def do_init(self, unique, _node, body):
        major, _minor, readahead, offered = struct.unpack_from("=4I", body)
        if major < 7:
            raise SystemExit("this kernel's FUSE is too old")
        flags = offered & (ASYNC_READ | BIG_WRITES | ASYNC_DIO | PARALLEL_DIROPS | MAX_PAGES)
        pages = MAX_TRANSFER // mmap.PAGESIZE
        self.reply(
            unique, 0,
            struct.pack("=4I HH II HH II 6I", 7, 31, readahead, flags, 4096, 4096, MAX_TRANSFER, 1,
                        pages, 0, 0, 0, *([0] * 6)),
        )  # fmt: skip

    def do_lookup(self, unique, _node, body):
        if bytes(body).rstrip(b"\0") != FILE_NAME:
            return self.reply(unique, errno.ENOENT)
        self.reply(
            unique, 0, struct.pack("=4Q 2I", FILE_ID, 0, 0, 0, 0, 0) + self.attributes(FILE_ID)
        )

    def do_getattr(self, unique, node, _body):
        self.reply(unique, 0, struct.pack("=Q2I", 0, 0, 0) + self.attributes(node))

    def do_setattr(self, unique, node, body):
        valid, _, _, size = struct.unpack_from("=IIQQ", body)
        if valid & (1 << 3):  # FATTR_SIZE
            if size > len(self.data):
                return self.reply(unique, errno.ENOSPC)
            self.size = size
        self.do_getattr(unique, node, body)

    def do_open(self, unique, _node, _body):
        self.reply(
            unique, 0, struct.pack("=QII", 0, FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES, 0)
        )

    def do_opendir(self, unique, _node, _body):
        self.reply(unique, 0, struct.pack("=QII", 0, 0, 0))

    def do_readdir(self, unique, _node, body):
        offset = RW_IN.unpack_from(body)[1]
        entry = struct.pack("=QQII", FILE_ID, 1, len(FILE_NAME), stat.S_IFREG >> 12) + FILE_NAME
        self.reply(unique, 0, b"" if offset else entry.ljust(-(-len(entry) // 8) * 8, b"\0"))

    def do_statfs(self, unique, _node, _body):
        self.reply(
            unique, 0, struct.pack("=5Q 4I 6I", 1 << 20, 0, 0, 1, 0, 4096, 255, 4096, 0, *([0] * 6))
        )

    def do_nothing(self, unique, _node, _body):
        self.reply(unique)

    def do_read(self, unique, _node, body):
        _, offset, length, *_ = RW_IN.unpack_from(body)
        self.transfer(unique, "read", offset, length)

    def do_write(self, unique, _node, body):
        _, offset, length, *_ = RW_IN.unpack_from(body)
        self.transfer(unique, "write", offset, bytes(body[RW_IN.size : RW_IN.size + length]))

    def do_fsync(self, unique, _node, _body):
        self.transfer(unique, "flush", 0, 0)

    HANDLERS = {
        INIT: do_init, LOOKUP: do_lookup, GETATTR: do_getattr, SETATTR: do_setattr, OPEN: do_open,
        READ: do_read, WRITE: do_write, STATFS: do_statfs, RELEASE: do_nothing, FSYNC: do_fsync,
        FLUSH: do_nothing, OPENDIR: do_opendir, READDIR: do_readdir, RELEASEDIR: do_nothing,
        ACCESS: do_nothing, DESTROY: do_nothing,
    }  # fmt: skip

    # --- the faults ---

    def transfer(self, unique, op, offset, what, past_stall=False):
        length = what if isinstance(what, int) else len(what)
        keep = length
        for rule in self.rules:
            if past_stall and rule.kind == "stall":
                continue
            if not rule.matches(op, offset, length):
                continue
            rule.use()
            if rule.kind == "fail":
                return self.reply(unique, rule.value)
            if rule.kind == "stall":
                until = time.monotonic() + self.max_stall_seconds
                self.stalled.append(Stalled(rule.id, unique, op, offset, what, until))
                return None
            keep = min(keep, rule.value)
        if op == "read":
            end = min(offset + keep, self.size)
            return self.reply(unique, 0, self.data[offset : max(end, offset)])
        if op == "write":
            if offset + keep > len(self.data):
                return self.reply(unique, errno.ENOSPC)
            self.size = max(self.size, offset + keep)
            self.data[offset : offset + keep] = what[:keep]
            self.record("write", offset, what[:keep])
            return self.reply(unique, 0, struct.pack("=II", keep, 0))
        self.record("flush", 0, b"")
        return self.reply(unique)

    def record(self, op, offset, data):
        if self.recording is not None:
            self.recording.append((op, offset, data))

    # --- the commands ---

    def command(self, name, args):
        return getattr(self, f"cmd_{name}")(**args)

    def cmd_rule(self, **spec):
        self.rules.append(Rule(spec))

    def cmd_hits(self, id):
        return next(rule.hits for rule in self.rules if rule.id == id)

    def cmd_drop(self, id=None):
        """Forgets a rule, or all; what is stalled by it goes on."""
        self.cmd_release(id)
        self.rules = [rule for rule in self.rules if id is not None and rule.id != id]

    def cmd_release(self, id=None, count=None):
        """Lets the oldest stalled requests go on; the rule stays and stalls the next ones."""
        going = [entry for entry in self.stalled if id is None or entry.rule == id][:count]
        self.let_go(going)
        return len(going)

    def let_go(self, going):
        self.stalled = [entry for entry in self.stalled if entry not in going]
        for entry in going:
            self.transfer(entry.unique, entry.op, entry.offset, entry.what, past_stall=True)

    def cmd_stalled(self):
        return [[entry.op, entry.offset, entry.length] for entry in self.stalled]

    def cmd_record(self):
        self.recording = []
        self.initial = self.data[: self.size]

    def cmd_log(self):
        return [[op, offset, len(data)] for op, offset, data in self.recording or []]

    def cmd_image(self, path, upto, without):
        """Writes what the disk holds after the first `upto` recorded operations, some left out."""
        image = bytearray(self.initial)
        for index, (_, offset, data) in enumerate((self.recording or [])[:upto]):
            if index not in without:
                image[offset : offset + len(data)] = data
        with open(path, "wb") as out:
            out.write(image)

    # --- the loop ---

    def run(self, control, parent):
        selector = selectors.DefaultSelector()
        for source in (self.fd, control, parent.pidfd):
            selector.register(source, selectors.EVENT_READ)
        os.set_blocking(self.fd, False)
        pending = b""
        control.sendall(b'{"ready": true}\n')
        tick = time.monotonic()
        while True:
            for key, _ in selector.select(self.seconds_to_next(tick)):
                if key.fileobj is control:
                    chunk = control.recv(65536)
                    if not chunk:
                        return
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        self.answer(control, json.loads(line))
                elif key.fileobj == parent.pidfd:
                    return
                elif not self.serve_one():  # unmounted by somebody
                    selector.unregister(self.fd)
            if time.monotonic() >= tick:
                if parent.is_ending():
                    return
                tick = time.monotonic() + TICK_SECONDS
            self.let_go([entry for entry in self.stalled if entry.until <= time.monotonic()])
            self.check_waiting(control)

    def seconds_to_next(self, tick):
        times = [tick, *(entry.until for entry in self.stalled[:1])]
        if self.waiting:
            times.append(self.waiting[1])
        return max(min(times) - time.monotonic(), 0)

    def answer(self, control, message):
        name, args = message["do"], message["args"]
        if name == "wait_stalled":
            self.waiting = (args["count"], time.monotonic() + args["timeout"])
            return
        try:
            reply = {"value": self.command(name, args)}
        except Exception as error:  # the test shall see it, and the disk stay usable
            reply = {"error": f"{type(error).__name__}: {error}"}
        control.sendall(json.dumps(reply).encode() + b"\n")

    def check_waiting(self, control):
        if self.waiting is None:
            return
        count, deadline = self.waiting
        if len(self.stalled) >= count or time.monotonic() >= deadline:
            self.waiting = None
            control.sendall(json.dumps({"value": len(self.stalled)}).encode() + b"\n")

    def close(self):
        self.rules = []
        self.cmd_release()
        ctypes.CDLL(None).umount2(self.mountpoint.encode(), MNT_DETACH)
        with contextlib.suppress(OSError):  # the client removes it too, where it lives
            os.rmdir(self.mountpoint)
        # whoever still has the file open keeps the file system alive: serve until it is let go,
        # but not for ever; closing /dev/fuse then turns what is left into ENOTCONN
        deadline = time.monotonic() + 5
        selector = selectors.DefaultSelector()
        selector.register(self.fd, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                if selector.select(0.2) and not self.serve_one():
                    break
        os.close(self.fd)


def main():
    mountpoint, size, control_fd, parent_pid, max_stall_seconds = sys.argv[1:]
    try:
        parent = Parent(int(parent_pid))
    except ProcessLookupError:
        os.rmdir(mountpoint)
        return
    control = socket.socket(fileno=int(control_fd))
    server = FaultFs(mountpoint, int(size), float(max_stall_seconds))
    try:
        server.run(control, parent)
    finally:
        server.close()


if __name__ == "__main__":
    main()
