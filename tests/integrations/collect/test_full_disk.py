"""Full disks of the application, the collector and PostgreSQL: small file systems, in a namespace of the test's own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MEGABYTES = {"application": 8, "collector": 32, "postgres": 160}
MOUNT = 'mount -t tmpfs -o size="$1"m none "$2" && shift 2 && exec "$@"'
AS_ROOT = os.geteuid() == 0
INSIDE = ["unshare", "-m" if AS_ROOT else "-rm", "sh", "-c", MOUNT, "sh"]


@functools.cache
def can_mount(folder: Path) -> bool:
    try:
        return subprocess.run([*INSIDE, "1", folder, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


# As the root of a user's namespace PostgreSQL does not start; test_full_postgres.py limits its files instead.
@pytest.mark.parametrize("scenario", ["application", "collector", *(["postgres"] if AS_ROOT else [])])
def test_nothing_is_lost_unseen_on_a_full_disk(scenario: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    disk = Path(tempfile.mkdtemp(prefix="cotune-disk-"))  # where the user of PostgreSQL may go
    request.addfinalizer(disk.rmdir)
    mounts = can_mount(disk)
    if scenario == "postgres" and not mounts:
        scenario = "collector"
    command = [sys.executable, "-m", "tests.integrations.collect.small_disk", scenario, disk, tmp_path]
    inside = [*INSIDE, str(MEGABYTES[scenario]), disk] if mounts else []
    done = subprocess.run(
        [*inside, *command, "tmpfs" if mounts else "limit"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
