"""Order of the whole run: quick folders first, whatever starts servers and real frameworks last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotune.integrations.ray_runtime import RayRuntime, open_ray

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent
ORDER = (".", "core", "trainer", "adapters", "integrations", "examples")


@pytest.fixture(scope="session")
def ray_runtime() -> Iterator[RayRuntime]:
    """One local Ray for the whole session. Its CPUs are a count only: actors share the machine's."""
    with open_ray("local", num_cpus=32) as runtime:
        yield runtime


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _rank(item.path))


def _rank(path: Path) -> int:
    parts = path.relative_to(ROOT).parts
    return ORDER.index(parts[0] if len(parts) > 1 else ".")
