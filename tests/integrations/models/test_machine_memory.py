"""The memory of a container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cotune.integrations.models import memory
from cotune.integrations.models.memory import machine_memory


def test_files_that_a_container_has_read_leave_its_memory_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = min(1 << 30, psutil.virtual_memory().available // 2)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{limit}\n")
    (tmp_path / "memory.stat").write_text(f"anon {limit // 4}\nactive_file 0\ninactive_file {limit * 3 // 4}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert machine_memory() == (limit * 3 // 4, limit)
