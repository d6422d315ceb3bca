# The C core as Cython sees it: csrc/kvio.h, and what kvio.devices needs of device.h and safety.h.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "kvio.h" nogil:
    enum: KVIO_STRIPED
    enum: KVIO_HIST_BUCKETS
    enum: KVIO_MAX_MEMBERS
    int64_t KVIO_PENDING

    enum kvio_direct:
        KVIO_DIRECT_REQUIRE
        KVIO_DIRECT_PREFER
        KVIO_DIRECT_OFF
    enum kvio_engine:
        KVIO_ENGINE_AUTO
        KVIO_ENGINE_URING
        KVIO_ENGINE_THREADS
        KVIO_ENGINE_URING_CMD
    enum kvio_opcode:
        KVIO_READ
        KVIO_WRITE
        KVIO_FLUSH
        KVIO_DISCARD
        KVIO_OPEN
        KVIO_CLOSE
        KVIO_REGISTER
        KVIO_UNREGISTER
    enum kvio_unaligned:
        KVIO_UNALIGNED_BOUNCE
        KVIO_UNALIGNED_REFUSE
    enum kvio_hugepages:
        KVIO_HUGE_AUTO
        KVIO_HUGE_REQUIRE
        KVIO_HUGE_OFF
    enum kvio_error_class:
        KVIO_CLASS_NONE
    enum kvio_huge_granted:
        KVIO_PAGES_4K
        KVIO_PAGES_THP
        KVIO_PAGES_HUGETLB

    struct kvio_error:
        int code
        int member
        uint64_t offset
        uint64_t length
        kvio_opcode op
        char message[640]

    kvio_error_class kvio_error_classify(int code)
    const char *kvio_error_class_name(kvio_error_class cls)

    struct kvio_memory:
        void *addr
        size_t size_bytes
        kvio_huge_granted granted
    int kvio_memory_map(kvio_memory *mem, size_t nbytes, kvio_hugepages want)
    void kvio_memory_unmap(kvio_memory *mem)

    struct kvio_volume:
        pass
    struct kvio_batch:
        pass

    struct kvio_volume_opts:
        const char **paths
        uint32_t n_paths
        bint write
        bint allow_destroy
        bint iopoll
        bint sqpoll
        kvio_direct direct
        kvio_engine engine
        kvio_unaligned unaligned
        uint64_t stripe_unit
        uint32_t queue_depth
        uint32_t max_inflight
        uint64_t max_inflight_bytes
        uint32_t submit_batch
        uint32_t workers
        uint32_t io_threads
        uint64_t deadline_ns
    ctypedef int (*kvio_interrupt_fn)(void *arg) noexcept nogil
    void kvio_volume_opts_init(kvio_volume_opts *opts)
    int kvio_volume_open(kvio_volume **out, const kvio_volume_opts *opts, kvio_error *err)
    int kvio_volume_close(kvio_volume *vol, uint64_t timeout_ns,
                          kvio_interrupt_fn interrupt, void *interrupt_arg, kvio_error *err)
    void kvio_volume_free(kvio_volume *vol)

    struct kvio_member_info:
        const char *path
        const char *identity
        const char *engine_reason
        kvio_engine engine
        uint64_t size_bytes
        uint32_t logical_block
        uint32_t physical_block
        uint32_t mem_align
        uint32_t offset_align
        uint32_t write_align
        uint32_t max_io_bytes
        uint32_t max_io_bytes_small_pages
        bint direct
        bint nowait_read
        bint volatile_cache
        bint can_discard
        bint sparse
        const char *overridden
    struct kvio_volume_info_s "kvio_volume_info":
        uint64_t size_bytes
        uint64_t stripe_unit
        uint32_t n_members
        uint32_t read_align
        uint32_t write_align
        uint32_t mem_align
        uint32_t queue_depth
        uint32_t max_inflight
        uint32_t workers
        uint32_t io_threads
        bint write
        bint uring
        int uring_errno
        uint32_t ring_flags
        bint registered_files
        bint registered_buffers
        int register_errno
        uint32_t regions
    void kvio_volume_get_info "kvio_volume_info"(const kvio_volume *vol, kvio_volume_info_s *info)
    int kvio_volume_member(const kvio_volume *vol, uint32_t index, kvio_member_info *info)

    struct kvio_op:
        uint64_t offset
        const iovec *iov
        uint32_t iovcnt
        int32_t member
    int kvio_volume_submit(kvio_volume *vol, kvio_opcode opcode, const kvio_op *ops, uint32_t n_ops,
                           uint64_t deadline_ns, void *owner, kvio_batch **out, kvio_error *err)
    int kvio_volume_run(kvio_volume *vol, kvio_opcode opcode, const kvio_op *ops, uint32_t n_ops,
                        uint64_t deadline_ns, void *owner, kvio_interrupt_fn interrupt,
                        void *interrupt_arg, kvio_batch **out, kvio_error *err)
    bint kvio_batch_done(const kvio_batch *batch)
    int kvio_batch_wait(kvio_batch *batch, uint64_t timeout_ns, kvio_interrupt_fn interrupt,
                        void *interrupt_arg)
    uint32_t kvio_batch_results(const kvio_batch *batch, int64_t *out)
    int kvio_batch_error(const kvio_batch *batch, uint32_t i, kvio_error *err)
    int kvio_batch_eventfd(kvio_batch *batch)
    struct kvio_notifier:
        pass
    int kvio_notifier_create(kvio_notifier **out)
    void kvio_notifier_put(kvio_notifier *notifier)
    int kvio_notifier_fd(const kvio_notifier *notifier)
    uint32_t kvio_notifier_take(kvio_notifier *notifier, uint64_t *tags, uint32_t max)
    int kvio_batch_notify(kvio_batch *batch, kvio_notifier *notifier, uint64_t tag)
    void *kvio_batch_take_owner(kvio_batch *batch)
    void kvio_batch_put(kvio_batch *batch)
    uint32_t kvio_volume_reclaim(kvio_volume *vol, void **owners, uint32_t max)
    bint kvio_volume_has_reclaim(const kvio_volume *vol)
    int kvio_volume_register(kvio_volume *vol, void *addr, size_t nbytes, bint huge,
                             kvio_error *err)
    int kvio_volume_unregister(kvio_volume *vol, void *addr)

    struct kvio_hist_snapshot:
        uint64_t count
        uint64_t min_ns
        uint64_t max_ns
        uint64_t sum_ns
        double sum_squares
        uint64_t buckets[KVIO_HIST_BUCKETS]
    struct kvio_io_stats:
        uint64_t ops
        uint64_t bytes
        uint64_t errors
        kvio_hist_snapshot latency
    struct kvio_member_stats:
        kvio_io_stats io[2]
        uint64_t flushes
        uint64_t discards
        uint64_t retries
        uint64_t in_flight
        uint32_t deadline_strikes
    struct kvio_volume_stats_s "kvio_volume_stats":
        kvio_io_stats io[2]
        uint64_t retries
        uint64_t short_reads
        uint64_t bounced
        uint64_t fixed_ops
        uint64_t unfixed_ops
        uint64_t direct_ops
        uint64_t stale_completions
        uint64_t deadline_exceeded
        uint64_t poisoned_rings
        uint64_t quarantined_buffers
        uint64_t quarantined_bytes
        uint32_t lanes
        uint32_t workers
        uint32_t io_threads
    uint64_t kvio_hist_lower_ns(uint32_t i)
    int kvio_volume_get_stats "kvio_volume_stats"(kvio_volume *vol, kvio_volume_stats_s *out)
    int kvio_volume_get_member_stats "kvio_volume_member_stats"(
        kvio_volume *vol, uint32_t index, kvio_member_stats *out)

    struct kvio_inspection:
        const char *kind
        uint64_t size_bytes
        uint32_t logical_block
        uint32_t physical_block
        uint32_t mem_align
        uint32_t offset_align
        uint32_t write_align
        uint32_t max_io_bytes
        bint direct
        bint nowait_read
        bint volatile_cache
        bint can_discard
        bint sparse
        char identity[80]
    int kvio_inspect(const char *path, kvio_inspection *out, kvio_error *err)
    int kvio_verdict(const char *path, const char *root, uint32_t *reasons, char *text,
                     size_t text_size)
