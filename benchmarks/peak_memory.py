"""The largest memory that a process has had, on Linux: psutil reports the present memory alone."""

from __future__ import annotations

from pathlib import Path


def peak_memory(pid: int | None = None) -> int:
    """Largest resident bytes so far of a process, or of this one."""
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory")
