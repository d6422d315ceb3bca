# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled border between Python and the C core: parse, pin the buffers, drop the GIL, call one
C function for the whole batch, convert the results. No policy."""

from cpython.buffer cimport (
    PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release,
    PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.number cimport PyNumber_Index
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.sequence cimport PySequence_Fast, PySequence_Fast_GET_ITEM, PySequence_Fast_GET_SIZE
from libc.errno cimport EBADF, EINTR, EINVAL, ENOMEM, EPERM, ESHUTDOWN, ETIME
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

cimport cython
cimport numpy as cnp

from kvio._ckvio cimport *

import os
import threading

import numpy as np

from kvio.errors import make_error

cnp.import_array()

cdef extern from "<errno.h>":
    int EDEADLK

cdef unsigned long _main_thread = threading.main_thread().ident
cdef tuple _OPS = ("read", "write", "flush", "discard", "open", "close", "register", "unregister")
cdef tuple _ENGINES = ("auto", "io_uring", "threads", "io_uring_cmd")


def _after_fork_in_child():
    global _main_thread
    _main_thread = threading.main_thread().ident


os.register_at_fork(after_in_child=_after_fork_in_child)


# ---- buffers that the engine holds -----------------------------------------------------------

cdef struct Hold:
    # What one batch needs of its caller: the exported buffers, kept until the engine lets go.
    Py_ssize_t n_views
    Py_buffer *views


cdef struct Request:
    # The ops of one call. ops and iovs are copied by the core; hold goes with the batch.
    kvio_op *ops
    iovec *iovs
    Hold *hold
    Py_ssize_t n


cdef void release_hold(Hold *hold) noexcept:
    cdef Py_ssize_t i
    if hold == NULL:
        return
    for i in range(hold.n_views):
        PyBuffer_Release(&hold.views[i])
    free(hold)


cdef void release_request(Request *req) noexcept:
    free(req.ops)
    req.ops = NULL
    release_hold(req.hold)
    req.hold = NULL


cdef int reserve(Request *req, Py_ssize_t n_ops, Py_ssize_t n_iovs, Py_ssize_t n_views) except -1:
    cdef char *block
    req.n = n_ops
    req.ops = NULL
    req.hold = NULL
    block = <char *>malloc(n_ops * sizeof(kvio_op) + n_iovs * sizeof(iovec) + 1)
    req.ops = <kvio_op *>block
    req.iovs = <iovec *>(block + n_ops * sizeof(kvio_op))
    if block == NULL:
        raise MemoryError()
    req.hold = <Hold *>malloc(sizeof(Hold) + n_views * sizeof(Py_buffer))
    if req.hold == NULL:
        free(block)
        req.ops = NULL
        raise MemoryError()
    req.hold.n_views = 0
    req.hold.views = <Py_buffer *>(<char *>req.hold + sizeof(Hold))
    return 0


cdef bint holds_objects(object array):
    cdef int kind = cnp.PyArray_TYPE(array)
    return kind == cnp.NPY_OBJECT or (kind == cnp.NPY_VOID and array.dtype.hasobject)


cdef int pin(Request *req, object buf, bint write_to, iovec *iov, Py_ssize_t index) except -1:
    """Exports one buffer into the hold and fills iov."""
    cdef Py_buffer *view = &req.hold.views[req.hold.n_views]
    if cnp.PyArray_Check(buf) and holds_objects(buf):
        where = f"buffers[{index}]" if index >= 0 else "the buffer"
        raise TypeError(f"{where}: an array of Python objects holds pointers, not data")
    try:
        PyObject_GetBuffer(buf, view, PyBUF_WRITABLE if write_to else PyBUF_SIMPLE)
    except (BufferError, ValueError, TypeError) as exc:
        where = f"buffers[{index}]" if index >= 0 else "the buffer"
        if not PyObject_CheckBuffer(buf):
            raise TypeError(
                f"{where}: {type(buf).__name__} has no buffer protocol; give bytes-like memory, "
                f"numpy arrays or kvio buffers") from None
        need = "writable and contiguous" if write_to else "contiguous"
        raise ValueError(f"{where}: memory must be {need} ({exc})") from None
    req.hold.n_views += 1
    iov.iov_base = view.buf
    iov.iov_len = view.len
    return 0


# ---- offsets ---------------------------------------------------------------------------------

cdef int64_t as_index(object value, str name) except? -1:
    """An exact integer (Cython's own conversion would cut a float)."""
    try:
        return <int64_t>PyNumber_Index(value)
    except TypeError:
        raise TypeError(f"{name}: an integer expected, got {type(value).__name__}") from None
    except OverflowError:
        raise ValueError(f"{name}: {value} is beyond 2^63 - 1") from None


cdef class Offsets:
    """Offsets of a call as int64 values, borrowed from an array or copied from a sequence."""
    cdef Py_buffer view
    cdef bint borrowed
    cdef int64_t *values
    cdef Py_ssize_t n

    def __cinit__(self, object offsets):
        cdef Py_ssize_t i
        if PyObject_CheckBuffer(offsets) and not isinstance(offsets, (bytes, bytearray)):
            PyObject_GetBuffer(offsets, &self.view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
            self.borrowed = True
            fmt = (<bytes>self.view.format).decode() if self.view.format != NULL else "B"
            if self.view.itemsize != 8 or fmt.lstrip("<=@") not in ("l", "q", "L", "Q"):
                raise TypeError(f"offsets: 64-bit integers expected, got items of format {fmt!r}; "
                                f"convert with numpy.asarray(offsets, dtype=numpy.int64)")
            if self.view.ndim != 1:
                raise ValueError(f"offsets: one dimension expected, got {self.view.ndim}")
            self.values = <int64_t *>self.view.buf
            self.n = self.view.len // 8
        else:
            sequence = PySequence_Fast(offsets, "offsets: an array or a sequence of integers "
                                                "expected")
            self.n = PySequence_Fast_GET_SIZE(sequence)
            self.values = <int64_t *>PyMem_Malloc(self.n * 8 + 8)
            if self.values == NULL:
                raise MemoryError()
            for i in range(self.n):
                item = <object>PySequence_Fast_GET_ITEM(sequence, i)
                if type(item) is int and -1 < item < INT64_MAX:
                    self.values[i] = item
                else:
                    self.values[i] = as_index(item, f"offsets[{i}]")
        for i in range(self.n):
            if self.values[i] < 0:
                raise ValueError(f"offsets[{i}]: {self.values[i]} is negative (or beyond 2^63 - 1)")

    def __dealloc__(self):
        if self.borrowed:
            PyBuffer_Release(&self.view)
        else:
            PyMem_Free(self.values)


# ---- a call's ops ----------------------------------------------------------------------------

cdef int parse_split(Request *req, Offsets offs, object buf, bint write_to) except -1:
    """One buffer, cut into equal parts."""
    cdef Py_ssize_t i
    cdef iovec whole
    cdef size_t part
    reserve(req, offs.n, offs.n, 1)
    pin(req, buf, write_to, &whole, -1)
    if offs.n == 0:
        return 0
    part = whole.iov_len // <size_t>offs.n
    if part * <size_t>offs.n != whole.iov_len:
        raise ValueError(f"one buffer of {whole.iov_len} bytes cannot be split into {offs.n} equal "
                         f"parts")
    for i in range(offs.n):
        req.iovs[i].iov_base = <char *>whole.iov_base + <size_t>i * part
        req.iovs[i].iov_len = part
        req.ops[i].offset = <uint64_t>offs.values[i]
        req.ops[i].iov = &req.iovs[i]
        req.ops[i].iovcnt = 1
        req.ops[i].member = KVIO_STRIPED
    return 0


cdef int parse_addresses(Request *req, Offsets offs, object addresses, object lengths) except -1:
    cdef uint64_t[::1] addr = addresses
    cdef uint64_t[::1] size = lengths
    cdef Py_ssize_t i
    reserve(req, offs.n, offs.n, 0)
    for i in range(offs.n):
        if size[i] > <uint64_t>INT64_MAX or (addr[i] == 0 and size[i] != 0):
            raise ValueError(f"address {addr[i]:#x} with length {size[i]} (item {i}) is no memory")
        req.iovs[i].iov_base = <void *><uintptr_t>addr[i]
        req.iovs[i].iov_len = size[i]
        req.ops[i].offset = <uint64_t>offs.values[i]
        req.ops[i].iov = &req.iovs[i]
        req.ops[i].iovcnt = 1
        req.ops[i].member = KVIO_STRIPED
    return 0


cdef int parse_list(Request *req, Offsets offs, object buffers, bint write_to) except -1:
    """A buffer, or a list of buffers, for each offset."""
    cdef object items = PySequence_Fast(buffers, "buffers: a list expected")
    cdef Py_ssize_t i, k, used = 0, total = 0, count
    if PySequence_Fast_GET_SIZE(items) != offs.n:
        raise ValueError(f"{offs.n} offsets but {PySequence_Fast_GET_SIZE(items)} buffers")
    for i in range(offs.n):
        item = <object>PySequence_Fast_GET_ITEM(items, i)
        total += len(item) if isinstance(item, (list, tuple)) else 1
    reserve(req, offs.n, total, total)
    for i in range(offs.n):
        item = <object>PySequence_Fast_GET_ITEM(items, i)
        req.ops[i].offset = <uint64_t>offs.values[i]
        req.ops[i].iov = &req.iovs[used]
        req.ops[i].member = KVIO_STRIPED
        count = 1
        if isinstance(item, (list, tuple)):
            count = len(item)
            if used + count > total:
                raise ValueError(f"buffers[{i}] grew while it was read")
            for k in range(count):
                pin(req, item[k], write_to, &req.iovs[used + k], i)
        else:
            pin(req, item, write_to, &req.iovs[used], i)
        req.ops[i].iovcnt = <uint32_t>count
        used += count
    return 0


cdef bint is_address_pair(object buffers, Py_ssize_t n):
    if type(buffers) is not tuple or len(buffers) != 2:
        return False
    for part in buffers:
        if not (isinstance(part, np.ndarray) and part.dtype == np.uint64 and part.ndim == 1
                and part.shape[0] == n):
            return False
    return True


cdef int parse(Request *req, Offsets offs, object buffers, bint write_to) except -1:
    if offs.n > 0x7fffffff:
        raise ValueError(f"{offs.n} operations in one batch: at most 2^31 - 1")
    req.ops = NULL
    req.hold = NULL
    try:
        if isinstance(buffers, (list, tuple)):
            if is_address_pair(buffers, offs.n):
                return parse_addresses(req, offs, buffers[0], buffers[1])
            return parse_list(req, offs, buffers, write_to)
        return parse_split(req, offs, buffers, write_to)
    except BaseException:
        release_request(req)
        raise


cdef uint64_t parse_deadline(object deadline) except? 0:
    """Seconds to nanoseconds; None is no deadline of this call."""
    if deadline is None:
        return 0
    cdef double seconds = deadline
    if not seconds > 0:
        raise ValueError(f"deadline {deadline!r}: a positive number of seconds expected, or None")
    return <uint64_t>min(max(seconds * 1e9, 1.0), 9e18)


cdef uint64_t parse_timeout(object timeout) except? 0:
    """Seconds to nanoseconds; None waits for ever."""
    if timeout is None:
        return UINT64_MAX
    cdef double seconds = timeout
    if not seconds >= 0:
        raise ValueError(f"timeout {timeout!r}: a number of seconds, 0 or more, or None expected")
    return <uint64_t>min(seconds * 1e9, 9e18)


cdef extern from "Python.h":
    # Without Cython's exception check: the handler's exception must stay set, see raise_pending().
    int PyErr_CheckSignals()


cdef int check_signals(void *arg) noexcept with gil:
    return PyErr_CheckSignals()


cdef kvio_interrupt_fn interrupt_for_this_thread() noexcept:
    # Python runs signal handlers in its main thread only.
    if PyThread_get_thread_ident() == _main_thread:
        return check_signals
    return NULL


cdef object error_from(kvio_error *err, Volume vol):
    path = None
    if vol is not None and 0 <= err.member < len(vol._paths):
        path = vol._paths[err.member]
    return make_error(
        err.code, err.message.decode("utf-8", "replace"), path=path, member=err.member,
        offset=err.offset, length=err.length, op=_OPS[<int>err.op],
        error_class=kvio_error_class_name(kvio_error_classify(err.code)).decode())


cdef object fail(int rc, kvio_error *err, Volume vol):
    """The exception for a call that was refused."""
    about_member = err.op == KVIO_OPEN and err.member >= 0
    if (rc == -EINVAL or rc == -EBADF) and not about_member:
        return ValueError(err.message.decode("utf-8", "replace"))
    if rc == -ENOMEM:
        return MemoryError(err.message.decode("utf-8", "replace"))
    err.code = rc
    return error_from(err, vol)


# ---- Volume ----------------------------------------------------------------------------------

cdef class Volume:
    """Compiled part of :class:`kvio.Volume`."""

    cdef kvio_volume *vol
    cdef readonly tuple _paths
    cdef object __weakref__
    cdef bint _closed

    def __init__(self):
        raise TypeError("use Volume.open(members, ...)")

    def _open(self, list paths, *, uint64_t stripe_unit, bint write, int direct, int engine,
              uint32_t queue_depth, uint32_t max_inflight, uint64_t max_inflight_bytes,
              uint32_t submit_batch, object deadline, bint allow_destroy, int unaligned,
              uint32_t workers, uint32_t io_threads, bint iopoll, bint sqpoll):
        cdef kvio_volume_opts opts
        cdef kvio_error err
        cdef const char *raw[KVIO_MAX_MEMBERS]
        cdef Py_ssize_t i
        cdef int rc
        if self.vol != NULL:
            raise ValueError("this volume is open already")
        if len(paths) > KVIO_MAX_MEMBERS:
            raise ValueError(f"{len(paths)} members: at most {KVIO_MAX_MEMBERS}")
        encoded = [os.fsencode(p) for p in paths]
        for i in range(len(encoded)):
            if b"\0" in encoded[i]:
                raise ValueError(f"members[{i}]: a path has no NUL byte")
            raw[i] = encoded[i]
        kvio_volume_opts_init(&opts)
        opts.paths = raw
        opts.n_paths = <uint32_t>len(paths)
        opts.stripe_unit = stripe_unit
        opts.write = write
        opts.direct = <kvio_direct>direct
        opts.engine = <kvio_engine>engine
        opts.queue_depth = queue_depth
        opts.max_inflight = max_inflight
        opts.max_inflight_bytes = max_inflight_bytes
        opts.submit_batch = submit_batch
        opts.deadline_ns = parse_deadline(deadline)
        opts.allow_destroy = allow_destroy
        opts.unaligned = <kvio_unaligned>unaligned
        opts.workers = workers
        opts.io_threads = io_threads
        opts.iopoll = iopoll
        opts.sqpoll = sqpoll
        self._paths = tuple(os.fspath(p) for p in paths)
        memset(&err, 0, sizeof(err))
        with nogil:
            rc = kvio_volume_open(&self.vol, &opts, &err)
        if rc:
            self.vol = NULL
            raise fail(rc, &err, self)

    def __dealloc__(self):
        cdef kvio_volume *vol = self.vol
        self.vol = NULL
        if vol == NULL:
            return
        if not self._closed:
            with nogil:
                kvio_volume_close(vol, 5000000000, NULL, NULL, NULL)
        drain(vol)
        kvio_volume_free(vol)

    cdef int ready(self) except -1:
        if self.vol == NULL:
            raise ValueError("this volume was never opened: use Volume.open(members, ...)")
        if kvio_volume_has_reclaim(self.vol):
            drain(self.vol)
        return 0

    def _reclaim(self):
        """Lets go of the buffers that the engine has let go of."""
        self.ready()

    cdef int usable(self, kvio_opcode opcode) except -1:
        self.ready()
        if self._closed:
            raise make_error(ESHUTDOWN, "the volume is closed", op=_OPS[<int>opcode],
                             error_class="shutdown")
        return 0

    cdef int64_t single(self, kvio_opcode opcode, object buf, object where,
                        object deadline) except -1:
        cdef Request req
        cdef kvio_batch *batch = NULL
        cdef int64_t result = 0
        cdef int64_t offset = as_index(where, "offset")
        if offset < 0:
            raise ValueError(f"offset {offset} is negative")
        self.usable(opcode)
        reserve(&req, 1, 1, 1)
        try:
            pin(&req, buf, opcode == KVIO_READ, &req.iovs[0], -1)
            req.ops[0].offset = <uint64_t>offset
            req.ops[0].iov = req.iovs
            req.ops[0].iovcnt = 1
            req.ops[0].member = KVIO_STRIPED
            batch = self.run(opcode, &req, parse_deadline(deadline))
            if kvio_batch_results(batch, &result) != 0:
                raise batch_error(batch, 0, self)
        finally:
            finish(batch, &req)
        return result

    cdef kvio_batch *run(self, kvio_opcode opcode, Request *req, uint64_t deadline_ns) except NULL:
        """Runs a blocking batch; the hold goes to the batch, which finish() settles."""
        cdef kvio_batch *batch = NULL
        cdef kvio_error err
        cdef kvio_interrupt_fn interrupt = interrupt_for_this_thread()
        cdef int rc
        with nogil:
            rc = kvio_volume_run(self.vol, opcode, req.ops, <uint32_t>req.n, deadline_ns, req.hold,
                                 interrupt, NULL, &batch, &err)
        if batch != NULL:
            req.hold = NULL
        if rc == 0:
            return batch
        if batch != NULL:
            finish(batch, req)
        if rc == -EINTR:
            return NULL  # the signal handler's exception is set
        raise fail(rc, &err, self)

    def pread(self, buf, offset, *, deadline=None):
        """Read into ``buf`` from ``offset`` bytes; see :class:`kvio.Volume`."""
        return self.single(KVIO_READ, buf, offset, deadline)

    def pwrite(self, buf, offset, *, deadline=None):
        """Write ``buf`` at ``offset`` bytes; see :class:`kvio.Volume`."""
        return self.single(KVIO_WRITE, buf, offset, deadline)

    cdef object blocking(self, kvio_opcode opcode, object offsets, object buffers, object deadline,
                         list errors):
        cdef Request req
        cdef kvio_batch *batch = NULL
        cdef Offsets offs = Offsets(offsets)
        cdef uint64_t deadline_ns = parse_deadline(deadline)
        cdef cnp.npy_intp n = offs.n
        self.usable(opcode)
        parse(&req, offs, buffers, opcode == KVIO_READ)
        try:
            batch = self.run(opcode, &req, deadline_ns)
            results = cnp.PyArray_SimpleNew(1, &n, cnp.NPY_INT64)
            failed = kvio_batch_results(batch, <int64_t *>cnp.PyArray_DATA(results))
            if failed and errors is not None:
                errors.extend(batch_errors(batch, self, n))
        finally:
            finish(batch, &req)
        return results

    def read_batch(self, offsets, buffers, *, deadline=None, list errors=None):
        """Read many ranges at once; see :class:`kvio.Volume`."""
        return self.blocking(KVIO_READ, offsets, buffers, deadline, errors)

    def write_batch(self, offsets, buffers, *, deadline=None, list errors=None):
        """Write many ranges at once; see :class:`kvio.Volume`."""
        return self.blocking(KVIO_WRITE, offsets, buffers, deadline, errors)

    cdef object submit(self, kvio_opcode opcode, object offsets, object buffers, object deadline):
        cdef Request req
        cdef kvio_error err
        cdef Offsets offs = Offsets(offsets)
        cdef uint64_t deadline_ns = parse_deadline(deadline)
        cdef Batch out = self._batch_class.__new__(self._batch_class)
        cdef int rc
        self.usable(opcode)
        parse(&req, offs, buffers, opcode == KVIO_READ)
        with nogil:
            rc = kvio_volume_submit(self.vol, opcode, req.ops, <uint32_t>req.n, deadline_ns,
                                    req.hold, &out.batch, &err)
        if rc:
            out.batch = NULL
            release_request(&req)
            raise fail(rc, &err, self)
        req.hold = NULL
        release_request(&req)
        out.vol = self
        out.n = offs.n
        return out

    def submit_read(self, offsets, buffers, *, deadline=None):
        """Start reading many ranges; see :class:`kvio.Volume`."""
        return self.submit(KVIO_READ, offsets, buffers, deadline)

    def submit_write(self, offsets, buffers, *, deadline=None):
        """Start writing many ranges; see :class:`kvio.Volume`."""
        return self.submit(KVIO_WRITE, offsets, buffers, deadline)

    cdef int control(self, kvio_opcode opcode, uint64_t offset, uint64_t length,
                     object deadline) except -1:
        cdef Request req
        cdef kvio_batch *batch = NULL
        cdef int64_t result = 0
        self.usable(opcode)
        reserve(&req, 1, 1, 0)
        try:
            req.iovs[0].iov_base = NULL
            req.iovs[0].iov_len = length
            req.ops[0].offset = offset
            req.ops[0].iov = req.iovs
            req.ops[0].iovcnt = 1
            req.ops[0].member = KVIO_STRIPED
            batch = self.run(opcode, &req, parse_deadline(deadline))
            if kvio_batch_results(batch, &result) != 0:
                raise batch_error(batch, 0, self)
        finally:
            finish(batch, &req)
        return 0

    def flush(self, *, deadline=None):
        """Flush all members in parallel; see :class:`kvio.Volume`."""
        self.control(KVIO_FLUSH, 0, 0, deadline)

    def discard(self, offset, length, *, deadline=None):
        """Deallocate a range; see :class:`kvio.Volume`."""
        cdef int64_t start = as_index(offset, "offset"), size = as_index(length, "length")
        if start < 0 or size < 0:
            raise ValueError(f"discard of {size} bytes at {start}: neither may be negative")
        self.control(KVIO_DISCARD, <uint64_t>start, <uint64_t>size, deadline)

    def _register(self, uintptr_t address, size_t nbytes, bint huge):
        """Registers a range of memory with every ring; 0 or the errno that the kernel gave."""
        cdef kvio_error err
        cdef int rc
        self.usable(KVIO_REGISTER)
        memset(&err, 0, sizeof(err))
        with nogil:
            rc = kvio_volume_register(self.vol, <void *>address, nbytes, huge, &err)
        if rc and err.message[0] != 0:
            raise fail(rc, &err, self)
        return -rc

    def _unregister(self, uintptr_t address):
        self.ready()
        cdef int rc = kvio_volume_unregister(self.vol, <void *>address)
        if rc:
            raise ValueError("this memory is not registered with the volume")

    def close(self, *, timeout=30.0):
        """Wait for what is in flight, then close; see :class:`kvio.Volume`."""
        cdef kvio_error err
        cdef uint64_t timeout_ns = parse_timeout(timeout)
        cdef kvio_interrupt_fn interrupt = interrupt_for_this_thread()
        cdef int rc
        if self.vol == NULL or self._closed:
            return
        self._closed = True
        with nogil:
            rc = kvio_volume_close(self.vol, timeout_ns, interrupt, NULL, &err)
        if rc == -EDEADLK:
            self._closed = False
        drain(self.vol)
        if rc == -EINTR:
            raise_pending()
        if rc:
            raise error_from(&err, self)

    @property
    def closed(self):
        """True after :meth:`close`, and before a successful open."""
        return self.vol == NULL or self._closed

    def _info(self):
        cdef kvio_volume_info_s info
        self.ready()
        kvio_volume_get_info(self.vol, &info)
        return info

    def _member_info(self, uint32_t index):
        cdef kvio_member_info info
        self.ready()
        if kvio_volume_member(self.vol, index, &info):
            raise IndexError(index)
        return {
            "path": self._paths[index],
            "size_bytes": info.size_bytes,
            "logical_block": info.logical_block,
            "physical_block": info.physical_block,
            "mem_align": info.mem_align,
            "offset_align": info.offset_align,
            "write_align": info.write_align,
            "max_io_bytes": info.max_io_bytes,
            "max_io_bytes_small_pages": info.max_io_bytes_small_pages,
            "overridden": info.overridden.decode("utf-8", "replace"),
            "direct": info.direct,
            "engine": _ENGINES[<int>info.engine],
            "engine_reason": info.engine_reason.decode("utf-8", "replace"),
            "nowait_read": info.nowait_read,
            "volatile_cache": info.volatile_cache,
            "can_discard": info.can_discard,
            "sparse": info.sparse,
            "identity": info.identity.decode("utf-8", "replace"),
        }

    def _stats(self):
        """(counters, read, write, [(read, write, counters) a member]) as plain values."""
        cdef kvio_volume_stats_s *st
        cdef kvio_member_stats *ms
        cdef uint32_t i
        cdef int rc
        self.ready()
        st = <kvio_volume_stats_s *>malloc(sizeof(kvio_volume_stats_s))
        ms = <kvio_member_stats *>malloc(sizeof(kvio_member_stats))
        if st == NULL or ms == NULL:
            free(st)
            free(ms)
            raise MemoryError()
        try:
            with nogil:
                rc = kvio_volume_get_stats(self.vol, st)
            if rc:
                raise forked_error()
            if kvio_volume_has_reclaim(self.vol):
                drain(self.vol)  # no quarantine in the figures, no buffer held
            counters = {
                "retries": st.retries, "short_reads": st.short_reads, "bounced": st.bounced,
                "fixed_ops": st.fixed_ops, "unfixed_ops": st.unfixed_ops,
                "direct_ops": st.direct_ops, "stale_completions": st.stale_completions,
                "poisoned_rings": st.poisoned_rings, "deadline_exceeded": st.deadline_exceeded,
                "quarantined_buffers": st.quarantined_buffers,
                "quarantined_bytes": st.quarantined_bytes, "lanes": st.lanes,
                "workers": st.workers, "io_threads": st.io_threads,
            }
            members = []
            for i in range(<uint32_t>len(self._paths)):
                with nogil:
                    kvio_volume_get_member_stats(self.vol, i, ms)
                members.append((io_stats(&ms.io[0]), io_stats(&ms.io[1]), {
                    "flushes": ms.flushes, "discards": ms.discards, "retries": ms.retries,
                    "in_flight": ms.in_flight, "strikes": ms.deadline_strikes}))
            return counters, io_stats(&st.io[0]), io_stats(&st.io[1]), members
        finally:
            free(st)
            free(ms)


cdef object forked_error():
    return make_error(EPERM, "this volume was opened before a fork(): a child must open its own, "
                             "the rings and threads belong to the parent")


cdef object io_stats(kvio_io_stats *io):
    counts = np.empty(KVIO_HIST_BUCKETS, np.uint64)
    cdef uint64_t[::1] view = counts
    cdef int i
    for i in range(KVIO_HIST_BUCKETS):
        view[i] = io.latency.buckets[i]
    return (io.ops, io.bytes, io.errors,
            (io.latency.count, io.latency.min_ns, io.latency.max_ns, io.latency.sum_ns,
             io.latency.sum_squares, counts))


def histogram_lower_bounds():
    """Lower edge in ns of each histogram bucket, uint64."""
    return np.array([kvio_hist_lower_ns(i) for i in range(KVIO_HIST_BUCKETS)], np.uint64)


cdef void drain(kvio_volume *vol) noexcept:
    """Releases the buffers of batches that the engine has let go of since the last call."""
    cdef void *owners[64]
    cdef uint32_t i, n = 64
    while n == 64:
        n = kvio_volume_reclaim(vol, owners, 64)
        for i in range(n):
            release_hold(<Hold *>owners[i])


cdef void finish(kvio_batch *batch, Request *req) noexcept:
    """Ends a blocking call: what the engine still holds comes back by drain()."""
    if batch != NULL:
        release_hold(<Hold *>kvio_batch_take_owner(batch))
        kvio_batch_put(batch)
    release_request(req)


cdef object batch_error(kvio_batch *batch, uint32_t i, Volume vol):
    cdef kvio_error err
    kvio_batch_error(batch, i, &err)
    return error_from(&err, vol)


cdef list batch_errors(kvio_batch *batch, Volume vol, Py_ssize_t n):
    cdef kvio_error err
    cdef uint32_t i
    out = []
    for i in range(<uint32_t>n):
        if kvio_batch_error(batch, i, &err):
            exc = error_from(&err, vol)
            exc.index = i
            out.append(exc)
    return out


# ---- Batch -----------------------------------------------------------------------------------

@cython.no_gc_clear  # the volume must outlive the batch, also in a reference cycle
cdef class Batch:
    """Compiled part of :class:`kvio.Batch`."""

    cdef kvio_batch *batch
    cdef Volume vol
    cdef Py_ssize_t n
    cdef object __weakref__

    def __dealloc__(self):
        if self.batch != NULL:
            release_hold(<Hold *>kvio_batch_take_owner(self.batch))
            kvio_batch_put(self.batch)

    def __len__(self):
        return self.n

    cdef int ready(self) except -1:
        if self.batch == NULL:
            raise ValueError("batches come from Volume.submit_read and Volume.submit_write")
        return 0

    def done(self):
        """True when all operations are over, or the deadline passed. Never blocks."""
        self.ready()
        if not kvio_batch_done(self.batch):
            return False
        release_hold(<Hold *>kvio_batch_take_owner(self.batch))
        return True

    def results(self):
        """Bytes or -errno for each operation, as int64.

        Raises
        ------
        ValueError
            The batch is not done yet.
        """
        self.ready()
        if not kvio_batch_done(self.batch):
            raise ValueError("the batch is not done: use wait() or await it")
        cdef cnp.npy_intp n = self.n
        out = cnp.PyArray_SimpleNew(1, &n, cnp.NPY_INT64)
        kvio_batch_results(self.batch, <int64_t *>cnp.PyArray_DATA(out))
        release_hold(<Hold *>kvio_batch_take_owner(self.batch))
        return out

    def wait(self, timeout=None):
        """Wait until done and return :meth:`results`.

        Parameters
        ----------
        timeout : float, optional
            Seconds; the batch goes on when it passes.

        Raises
        ------
        TimeoutError
            ``timeout`` passed first.
        """
        cdef uint64_t timeout_ns = parse_timeout(timeout)
        cdef kvio_interrupt_fn interrupt
        cdef int rc = 0
        self.ready()
        if not kvio_batch_done(self.batch):
            interrupt = interrupt_for_this_thread()
            with nogil:
                rc = kvio_batch_wait(self.batch, timeout_ns, interrupt, NULL)
            if rc == -EINTR:
                raise_pending()
            if rc == -EPERM:
                raise forked_error()
        if rc == -ETIME:
            raise TimeoutError(f"the batch of {self.n} operations is not done after {timeout} s; "
                               f"it goes on")
        return self.results()

    def errors(self):
        """A :class:`KvioError` for each failed operation, with its number in ``.index``."""
        self.ready()
        if not kvio_batch_done(self.batch):
            raise ValueError("the batch is not done: use wait() or await it")
        return batch_errors(self.batch, self.vol, self.n)

    def _eventfd(self):
        """An eventfd that becomes readable when the batch is done. It belongs to the batch."""
        self.ready()
        cdef int fd = kvio_batch_eventfd(self.batch)
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd) + " (an eventfd; see ulimit -n)")
        return fd

    def _notify(self, Notifier notifier, uint64_t tag):
        """Reports to the notifier, with this tag, when done; False when it does so already."""
        self.ready()
        return kvio_batch_notify(self.batch, notifier.notifier, tag) == 0


cdef class Notifier:
    """One eventfd for all the batches that an event loop waits for."""

    cdef kvio_notifier *notifier

    def __cinit__(self):
        cdef int rc = kvio_notifier_create(&self.notifier)
        if rc:
            self.notifier = NULL
            raise OSError(-rc, os.strerror(-rc) + " (an eventfd; see ulimit -n)")

    def __dealloc__(self):
        if self.notifier != NULL:
            kvio_notifier_put(self.notifier)

    def fileno(self):
        """The eventfd; readable when :meth:`take` has something."""
        return kvio_notifier_fd(self.notifier)

    def take(self):
        """Tags of the batches that are done."""
        cdef uint64_t tags[256]
        cdef uint32_t i, n = kvio_notifier_take(self.notifier, tags, 256)
        return [tags[i] for i in range(n)]


cdef int raise_pending() except -1:
    """The signal handler's exception is set: let it through."""
    return -1


# ---- memory ----------------------------------------------------------------------------------

cdef class Memory:
    """A mapping for I/O; compiled part of :class:`kvio.BufferPool`."""

    cdef kvio_memory mem
    cdef object __weakref__

    def __cinit__(self, *args, **kwargs):
        self.mem.addr = NULL

    def _map(self, size_t nbytes, int hugepages):
        cdef int rc
        with nogil:
            rc = kvio_memory_map(&self.mem, nbytes, <kvio_hugepages>hugepages)
        return -rc

    def __dealloc__(self):
        kvio_memory_unmap(&self.mem)

    @property
    def address(self):
        """Address of the first byte."""
        return <uintptr_t>self.mem.addr

    @property
    def nbytes(self):
        """Bytes mapped."""
        return self.mem.size_bytes

    @property
    def hugepages(self):
        """What was granted: ``hugetlb``, ``thp`` or ``none``."""
        return ("none", "thp", "hugetlb")[<int>self.mem.granted]


cdef class Slice:
    """A part of a mapping with the buffer protocol; compiled part of :class:`kvio.Buffer`."""

    cdef Memory memory
    cdef readonly size_t start
    cdef readonly size_t nbytes
    cdef Py_ssize_t exports
    cdef bint freed
    cdef object __weakref__

    def _attach(self, Memory memory, size_t start, size_t nbytes):
        if start + nbytes > memory.mem.size_bytes:
            raise ValueError("beyond the mapping")
        self.memory = memory
        self.start = start
        self.nbytes = nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.memory is None or self.freed:
            raise ValueError("this buffer was freed")
        cdef int rc = fill_view(view, self, <char *>self.memory.mem.addr + self.start,
                                <Py_ssize_t>self.nbytes, flags)
        if rc == 0:
            self.exports += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.exports -= 1

    def __len__(self):
        return self.nbytes

    @property
    def address(self):
        """Address of the first byte."""
        if self.memory is None or self.freed:
            raise ValueError("this buffer was freed")
        return <uintptr_t>self.memory.mem.addr + self.start

    cdef int retire(self) except -1:
        if self.exports:
            raise BufferError(f"{self.exports} views of this buffer exist, or I/O on it is in "
                              f"flight: release them first")
        self.freed = True
        return 0

    def _retire(self):
        """Marks it freed; True when it was not before. BufferError while views exist."""
        if self.freed:
            return False
        self.retire()
        return True


cdef extern from "Python.h":
    int PyBuffer_FillInfo(Py_buffer *view, object exporter, void *buf, Py_ssize_t len, int readonly,
                          int flags) except -1


cdef int fill_view(Py_buffer *view, object owner, void *addr, Py_ssize_t n, int flags) except -1:
    return PyBuffer_FillInfo(view, owner, addr, n, 0, flags)


def buffer_range(buf):
    """(address, bytes) of contiguous writable memory."""
    cdef Py_buffer view
    PyObject_GetBuffer(buf, &view, PyBUF_WRITABLE)
    try:
        return <uintptr_t>view.buf, view.len
    finally:
        PyBuffer_Release(&view)


# ---- looking at one path ---------------------------------------------------------------------

def inspect_device(path):
    """What a path is as a member: kind, size, alignment, limits, as a dict.

    Raises
    ------
    KvioError
        It is no usable member; the message says why.
    """
    cdef kvio_inspection out
    cdef kvio_error err
    cdef bytes raw = os.fsencode(path)
    cdef const char *c_path = raw
    cdef int rc
    memset(&err, 0, sizeof(err))
    err.member = -1
    err.op = KVIO_OPEN
    with nogil:
        rc = kvio_inspect(c_path, &out, &err)
    if rc:
        err.code = rc
        exc = error_from(&err, None)
        exc.filename = os.fspath(path)
        raise exc
    return {
        "kind": out.kind.decode(), "size_bytes": out.size_bytes,
        "logical_block": out.logical_block, "physical_block": out.physical_block,
        "mem_align": out.mem_align, "offset_align": out.offset_align,
        "write_align": out.write_align, "max_io_bytes": out.max_io_bytes, "direct": out.direct,
        "nowait_read": out.nowait_read, "volatile_cache": out.volatile_cache,
        "can_discard": out.can_discard, "sparse": out.sparse,
        "identity": out.identity.decode("utf-8", "replace"),
    }


def safety_verdict(path, root=""):
    """(reasons, text): why kvio would refuse to write to a path; (0, "") when it would.

    ``root`` is a prefix for /sys and /proc. Raises OSError when the path cannot be looked at.
    """
    cdef char text[2048]
    cdef uint32_t reasons = 0
    cdef bytes raw = os.fsencode(path), raw_root = os.fsencode(root)
    cdef const char *c_path = raw
    cdef const char *c_root = raw_root
    cdef int rc
    with nogil:
        rc = kvio_verdict(c_path, c_root, &reasons, text, sizeof(text))
    if rc:
        raise OSError(-rc, os.strerror(-rc), os.fspath(path))
    return reasons, text.decode("utf-8", "replace")
