"""Steps of demonstrations: stages that can be stopped, and commands of cotune.

Each stage is announced, runs once, and stores its result and its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console


def run_cotune(url: str, *words: str) -> None:
    """Print and run a cotune command in a process of its own, with the application's provider at `url`."""
    print("$ cotune " + " ".join(words), flush=True)
    began = time.perf_counter()
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    subprocess.run([sys.executable, "-m", "cotune", *words], env=environment, check=True)
    print(f"({time.perf_counter() - began:.0f} s)", flush=True)


LOOK_EVERY = 2.0
"""Seconds between two looks at the memory."""


class Stages:
    """A file with the results of stages, as JSON, and their seconds, CPU seconds and peak memory. Finished stages are
    not run again. A stage that was stopped is, and its time before is added."""

    def __init__(self, file: Path, console: Console) -> None:
        self.file, self.console = file, console
        self.stages: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def once(self, name: str, command: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, from the file if it was done before. `command` does the same by hand."""
        stage = self.stages.setdefault(name, {"seconds": 0.0, "cpu_seconds": 0.0, "peak_gb": 0.0})
        if "result" not in stage:
            self.console.rule(f"[bold]{name}")
            self.console.print(f"$ {command}", style="cyan", markup=False, highlight=False)
            watch = Watch()
            try:
                stage["result"] = work()
            finally:
                seconds, cpu_seconds, peak_gb = watch.stop()
                stage["seconds"] = round(stage["seconds"] + seconds, 1)
                stage["cpu_seconds"] = round(stage["cpu_seconds"] + cpu_seconds, 1)
                stage["peak_gb"] = round(max(stage["peak_gb"], peak_gb), 2)
                self.file.write_text(json.dumps(self.stages, indent=2) + "\n")
        return stage["result"]

    def took(self) -> dict[str, Any]:
        """Seconds by stage and in all, CPU seconds of all, and the highest peak of all processes together in GB."""
        seconds = {name: stage["seconds"] for name, stage in self.stages.items()}
        return {
            "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
            "cpu_seconds": round(sum(stage["cpu_seconds"] for stage in self.stages.values()), 1),
            "peak_gb": max(stage["peak_gb"] for stage in self.stages.values()),
        }


class Watch:
    """Adds up this process and all below it, while it runs; pages that they share count once (PSS)."""

    def __init__(self) -> None:
        self.me, self.peak, self.cpu = psutil.Process(), 0, dict[int, float]()
        self.began, self.before = time.perf_counter(), sum(self.me.cpu_times()[:2])
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def stop(self) -> tuple[float, float, float]:
        """Seconds, CPU seconds (user and system), and the peak in GB."""
        self.over.set()
        self.thread.join()
        return time.perf_counter() - self.began, sum(self.cpu.values()) - self.before, self.peak / 1e9

    def _watch(self) -> None:
        self._look()
        while not self.over.wait(LOOK_EVERY):
            self._look()
        self._look()

    def _look(self) -> None:
        memory = 0
        for process in (self.me, *self.me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                self.cpu[process.pid] = sum(process.cpu_times()[:2])
                memory += process.memory_full_info().pss
        self.peak = max(self.peak, memory)
