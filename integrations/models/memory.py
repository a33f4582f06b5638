"""How much memory a machine and a process have."""

from __future__ import annotations

import os
import re
from pathlib import Path

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def machine_memory() -> tuple[int, int]:
    """Free and total bytes, within the limit of the container."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    info = Path("/proc/meminfo")
    if info.is_file():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit() and int(text) < total:
        total = int(text)
        free = min(free, total - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free, total


def process_memory() -> int:
    """Resident bytes of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_memory(pid: int | None = None) -> int:
    """Largest resident bytes so far of a process, or of this one; 0 where the system does not tell."""
    try:
        status = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def parse_size(text: str) -> int:
    """Bytes that a text like `6GiB` or `800 MB` stands for. Raises ValueError for any other."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS[found[2].upper()])
