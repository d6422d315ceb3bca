"""What kvio bench does with the options of fio that it does not carry out, and why."""

from __future__ import annotations

# (reason, options); the message is "<option> has no effect: <reason>".
_NOTED = (
    (
        "kvio does not touch the page cache beyond O_DIRECT",
        """
        fadvise_hint invalidate uncached write_hint
        """,
    ),
    (
        "kvio always measures, in the engine",
        """
        clat_percentiles clocksource disable_bw disable_bw_measurement disable_clat disable_lat
        disable_slat eta eta_newline gtod_cpu gtod_reduce lat_percentiles latency_percentile
        significant_figures slat_percentiles stats unit_base
        """,
    ),
    (
        "members are always preallocated and written through when they are made",
        """
        create_fsync create_on_open create_serialize fallocate overwrite
        """,
    ),
    (
        "what is written is random data, made once",
        """
        refill_buffers scramble_buffers
        """,
    ),
    (
        "the stripes decide which member serves an I/O",
        """
        file_service_type openfiles
        """,
    ),
    (
        "kvio chooses its buffers; see fixedbufs and hugepages",
        """
        hugepage_size iomem iomem_align mem mem_align nonvectored
        """,
    ),
    (
        "use the JSON report's kvio.jobs[].samples or --plot",
        """
        block_error_percentiles log_alternate_epoch log_alternate_epoch_clock_id log_avg_msec
        log_compression log_compression_cpus log_entries log_hist_coarseness log_hist_msec
        log_max_value log_offset log_prio log_store_compressed log_unix_epoch per_job_logs
        write_bw_log write_hist_log write_iops_log write_lat_log
        """,
    ),
    (
        "kvio has one generator of offsets, which needs no map",
        """
        allrandrepeat random_generator
        """,
    ),
    (
        "the engine keeps the queue full",
        """
        iodepth_low
        """,
    ),
    (
        "the engine submits from native threads",
        """
        io_submit_mode
        """,
    ),
    (
        "the engine decides per member whether threads are better",
        """
        force_async
        """,
    ),
    (
        "a bad block is described in the report",
        """
        verify_dump
        """,
    ),
    (
        "blocks are checked as they arrive",
        """
        verify_async
        """,
    ),
    (
        "blocks are checked after the writes",
        """
        verify_backlog verify_backlog_batch
        """,
    ),
    (
        "every block's header says what it must be",
        """
        verify_state_load verify_state_save
        """,
    ),
    (
        "the contents of a block depend on its address alone, so overlapping writes agree",
        """
        serialize_overlap
        """,
    ),
    (
        "each job ends by itself",
        """
        exit_what exitall
        """,
    ),
    (
        "see CPU seconds per GB in the report",
        """
        idle_prof
        """,
    ),
    (
        "there is no such limit",
        """
        max_jobs
        """,
    ),
    (
        "there is no such arena",
        """
        alloc_size
        """,
    ),
    (
        "a progress line is shown on a terminal only",
        """
        minimal_progress
        """,
    ),
)

# (reason, options); the message is "option <option> is not supported: <reason>".
_REFUSED = (
    (
        "use cpus_allowed, or start kvio under numactl",
        """
        cpumask cpus_allowed_policy numa_cpu_nodes numa_mem_policy sqthread_poll_cpu
        """,
    ),
    (
        "all blocks of a direction have one size; use several jobs",
        """
        ba blockalign blocksize_range blocksize_unaligned bs_is_seq_rand bs_unaligned bsrange
        bssplit
        """,
    ),
    (
        "zoned devices are not supported",
        """
        ignore_zone_limits job_max_open_zones max_open_zones read_beyond_wp zone_reset_frequency
        zone_reset_threshold zonecapacity zonemode zonerange zonesize zoneskip
        """,
    ),
    (
        "kvio bench reads and writes blocks; it does no other work",
        """
        error_dump exec_postrun exec_prerun file_append fill_device flow flow_id flow_sleep
        ioscheduler lockfile merge_blktrace_file merge_blktrace_iters merge_blktrace_scalars
        opendir pre_read profile read_iolog read_iolog_chunked replay_align replay_no_stall
        replay_redirect replay_scale replay_skip replay_time_scale trim_backlog
        trim_backlog_batch trim_percentage trim_verify_zero unlink_each_loop write_iolog
        """,
    ),
    (
        "kvio bench does not steer a job by what it measures",
        """
        latency_run latency_target latency_window max_latency rate_cycle rate_ignore_thinktime
        rate_iops_min rate_min rate_process steadystate steadystate_duration
        steadystate_ramp_time
        """,
    ),
    (
        "use rate or rate_iops to pace a job",
        """
        thinktime thinktime_blocks thinktime_blocks_type thinktime_iotime thinktime_spin
        """,
    ),
    (
        "kvio flushes all members at once; use end_fsync",
        """
        atomic fdatasync fsync sync sync_file_range write_barrier
        """,
    ),
    (
        "use zero_buffers, buffer_pattern or the default random data",
        """
        buffer_compress_chunk buffer_compress_percentage dedupe_global dedupe_mode
        dedupe_percentage dedupe_working_set_percentage
        """,
    ),
    (
        "give each pattern a job of its own",
        """
        lfsr offset_align percentage_random rw_sequencer
        """,
    ),
    (
        "kvio bench runs on this machine only",
        """
        client daemonize remote_config server
        """,
    ),
    (
        "use --output-format=json",
        """
        minimal terse_version
        """,
    ),
    (
        "kvio never writes to a mounted device",
        """
        allow_mounted_write
        """,
    ),
    (
        "the header is at the start of a block",
        """
        verify_offset
        """,
    ),
    (
        "it is not part of fio any more",
        """
        experimental_verify
        """,
    ),
    (
        "name the members with filename",
        """
        filename_format unique_filename
        """,
    ),
    (
        "use continue_on_error",
        """
        ignore_error
        """,
    ),
    (
        "use stonewall",
        """
        wait_for
        """,
    ),
    (
        "start kvio in the cgroup",
        """
        cgroup cgroup_nodelete cgroup_weight
        """,
    ),
    (
        "start kvio as that user",
        """
        gid uid
        """,
    ),
    (
        "use nice, or start kvio under ionice",
        """
        prio prioclass
        """,
    ),
    (
        "I/O priorities are not supported",
        """
        cmdprio cmdprio_bssplit cmdprio_class cmdprio_percentage
        """,
    ),
    (
        "start kvio in a cgroup with a memory limit",
        """
        lockmem
        """,
    ),
    (
        "the engine decides that",
        """
        nowait
        """,
    ),
    (
        "reads and writes are reported apart; add them up",
        """
        unified_rw_reporting
        """,
    ),
)


def _by_name(groups: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return {name: reason for reason, names in groups for name in names.split()}


# Names are spelled with underscores only.
NOTED: dict[str, str] = _by_name(_NOTED)
REFUSED: dict[str, str] = _by_name(_REFUSED)
