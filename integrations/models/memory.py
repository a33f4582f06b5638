"""How much memory this machine and this process have."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def machine_memory() -> tuple[int, int]:
    """Free and total bytes, within the limit of the container."""
    memory = psutil.virtual_memory()
    free = int(memory.available)
    total = int(memory.total)
    # psutil reports the whole machine; the limit of a container is in its control group.
    limit_file = _CGROUP / "memory.max"
    limit = limit_file.read_text().strip() if limit_file.is_file() else ""
    has_limit = limit.isdigit()  # "max" for a container without a limit
    if has_limit and int(limit) < total:
        total = int(limit)
        used = int((_CGROUP / "memory.current").read_text())
        free = min(free, total - used + _reclaimable_bytes())
    return free, total


def _reclaimable_bytes() -> int:
    """Bytes of files that the system keeps in the container's memory and gives up when a process needs it."""
    for line in (_CGROUP / "memory.stat").read_text().splitlines():
        name, _, count = line.partition(" ")
        if name == "inactive_file":
            return int(count)
    return 0


def process_memory() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)
