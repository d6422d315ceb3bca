"""The process behind support.faultdev: a FUSE file system with one file that misbehaves on request.

Speaks the kernel's FUSE protocol itself (linux/fuse.h, 7.31 and later): a library in between would
serialise direct I/O (libfuse 2 does not negotiate FUSE_ASYNC_DIO) and block a thread per stall.

Run as `python faultfs.py MOUNTPOINT SIZE_BYTES CONTROL_FD`, as root. Commands come as one JSON
object a line through the control socket, each answered by one. End of file there, however it comes
about, releases every stall, unmounts and ends the process.

One thread, one loop: a request that shall stall is put aside and answered when it is released.
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
    def __init__(self, mountpoint, size):
        self.mountpoint = mountpoint
        self.data = mmap.mmap(-1, max(size, 1))
        self.size = size
        self.rules = []
        self.hits = {}
        self.stalled = []  # (rule id, unique, op, offset, payload or length)
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
        request = os.read(self.fd, MAX_TRANSFER + 65536)
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        body = memoryview(request)[IN_HEADER.size :]
        if opcode in SILENT:
            return
        handler = self.HANDLERS.get(opcode)
        if handler is None:
            self.reply(unique, errno.ENOSYS)
        else:
            handler(self, unique, node, body)

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
                self.stalled.append((rule.id, unique, op, offset, what))
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
        going = [entry for entry in self.stalled if id is None or entry[0] == id][:count]
        self.stalled = [entry for entry in self.stalled if entry not in going]
        for _, unique, op, offset, what in going:
            self.transfer(unique, op, offset, what, past_stall=True)
        return len(going)

    def cmd_stalled(self):
        return [
            [op, offset, w if isinstance(w, int) else len(w)]
            for _, _, op, offset, w in self.stalled
        ]

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

    def run(self, control):
        selector = selectors.DefaultSelector()
        selector.register(self.fd, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        os.set_blocking(self.fd, False)
        pending = b""
        control.sendall(b'{"ready": true}\n')
        while True:
            timeout = max(self.waiting[1] - time.monotonic(), 0) if self.waiting else None
            for key, _ in selector.select(timeout):
                if key.fileobj is control:
                    chunk = control.recv(65536)
                    if not chunk:
                        return
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        self.answer(control, json.loads(line))
                    continue
                try:
                    self.serve_one()
                except BlockingIOError:
                    pass
                except OSError as error:
                    if error.errno != errno.ENODEV:  # unmounted by somebody
                        raise
                    selector.unregister(self.fd)
            self.check_waiting(control)

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
        # whoever still has the file open keeps the file system alive: serve until it is let go,
        # but not for ever; closing /dev/fuse then turns what is left into ENOTCONN
        deadline = time.monotonic() + 5
        selector = selectors.DefaultSelector()
        selector.register(self.fd, selectors.EVENT_READ)
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                if selector.select(0.2):
                    self.serve_one()
        os.close(self.fd)
        with contextlib.suppress(OSError):  # the client removes it too, where it lives
            os.rmdir(self.mountpoint)


def main():
    mountpoint, size, control_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    control = socket.socket(fileno=control_fd)
    server = FaultFs(mountpoint, size)
    try:
        server.run(control)
    finally:
        server.close()


if __name__ == "__main__":
    main()
