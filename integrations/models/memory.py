"""How much memory this machine and this process have."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def machine_memory() -> tuple[int, int]:
    """Free and total bytes, within the limit of the container."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    # psutil reports the whole machine; the limit of a container is in its control group.
    limit = _CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()).isdigit() and int(text) < total:
        total = int(text)
        free = min(free, total - int((_CGROUP / "memory.current").read_text()))
    return free, total


def process_memory() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)
