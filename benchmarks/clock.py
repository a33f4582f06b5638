"""Seconds and processor time of the phases of a step."""

from __future__ import annotations

import time
from collections import defaultdict

import psutil


class Clock:
    """Seconds by phase, on the wall and of CPU in this process and in the one with the id `process`."""

    def __init__(self, process: int | None = None) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self._process = process

    def now(self) -> tuple[float, float]:
        used = time.process_time()
        if self._process is not None:
            other = psutil.Process(self._process).cpu_times()
            used += other.user + other.system
        return time.perf_counter(), used

    def add(self, phase: str, began: tuple[float, float]) -> tuple[float, float]:
        """Count the time since `began`; returns the present one."""
        now = self.now()
        self.seconds[phase].append(now[0] - began[0])
        self.cpu[phase].append(now[1] - began[1])
        return now
