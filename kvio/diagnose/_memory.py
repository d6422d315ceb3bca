# SPDX-License-Identifier: Apache-2.0
"""Checks of huge pages: with them buffers register faster and transfers cost less."""

from __future__ import annotations

from collections.abc import Iterator

from kvio.diagnose._finding import Finding, Host, Severity, chosen, size

_POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
_POOL_PAGE_BYTES = 2 << 20
_THP = "sys/kernel/mm/transparent_hugepage"


def check_hugetlb(host: Host) -> Iterator[Finding]:
    """Reserved huge pages of 2 MiB, free ones against the need."""
    total = host.number(f"{_POOL}/nr_hugepages")
    if total is None:
        yield Finding(
            "memory.hugetlb", Severity.INFO, "this kernel has no pool of 2 MiB huge pages"
        )
        return
    reserved = host.number(f"{_POOL}/resv_hugepages") or 0
    free = max(0, (host.number(f"{_POOL}/free_hugepages") or 0) - reserved)
    need = -(-host.need_bytes // _POOL_PAGE_BYTES)
    if free >= need:
        yield Finding("memory.hugetlb", Severity.OK, f"{free} huge pages of 2 MiB are free")
        return
    transparent = chosen(host.text(f"{_THP}/enabled")) in ("always", "madvise")
    yield Finding(
        "memory.hugetlb",
        Severity.INFO if transparent else Severity.WARN,
        f"{free} huge pages of 2 MiB are free, and {size(host.need_bytes)} of buffers take {need}",
        "kvio uses transparent huge pages instead" if transparent else "kvio uses 4 KiB pages",
        f"sysctl -w vm.nr_hugepages={total + need - free} (early after boot, before memory is "
        "fragmented; /etc/sysctl.d/kvio.conf to keep it)",
    )


def check_transparent(host: Host) -> Iterator[Finding]:
    """Transparent huge pages, and what a page fault does to get one."""
    enabled = chosen(host.text(f"{_THP}/enabled"))
    if enabled in ("", "never"):
        yield Finding(
            "memory.thp",
            Severity.WARN,
            "transparent huge pages are off" if enabled else "no transparent huge pages here",
            "without reserved huge pages, buffers then consist of 4 KiB pages",
            f"echo madvise > /{_THP}/enabled" if enabled else "",
        )
        return
    yield Finding("memory.thp", Severity.OK, f"transparent huge pages: {enabled}")
    defrag = chosen(host.text(f"{_THP}/defrag"))
    if defrag == "always":
        yield Finding(
            "memory.thp_defrag",
            Severity.WARN,
            "every page fault of every program may stop to compact memory (defrag: always)",
            remedy=f"echo madvise > /{_THP}/defrag",
        )
    elif defrag in ("never", "defer"):
        yield Finding(
            "memory.thp_defrag",
            Severity.INFO,
            f"buffers get huge pages only while free ones are at hand (defrag: {defrag})",
            remedy=f"echo defer+madvise > /{_THP}/defrag",
        )
    elif defrag:
        yield Finding("memory.thp_defrag", Severity.OK, f"huge pages on request (defrag: {defrag})")
