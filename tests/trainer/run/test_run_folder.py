"""A run folder that is taken away, or whose disk is full, while a run writes to it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from cotune.errors import RunError
from cotune.trainer.config.load import convert
from cotune.trainer.run.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path):
    made = RunFolder.create(tmp_path / "run", convert({"model": "m"}), workflow=None, tasks=None)
    yield made
    made.close()


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), RunError("48 records could not be stored.")])
def test_a_folder_that_was_removed_is_the_cause_of_what_fails_then(folder: RunFolder, error: Exception) -> None:
    with (
        pytest.raises(RunError, match=r"run was removed or moved while.*Put it back.*--resume.*new run"),
        folder.noting_errors(),
    ):
        shutil.rmtree(folder.path)
        raise error
    folder.discard_unbegun()


def test_a_full_disk_is_the_cause_with_the_way_to_go_on(folder: RunFolder) -> None:
    folder.latest.write_text("step-000001")
    with pytest.raises(RunError, match=r"disk of .*metrics.jsonl is full.*--resume"), folder.noting_errors():
        raise OSError(errno.ENOSPC, "No space left on device", str(folder.metrics))


def test_other_errors_stay_what_they_are(folder: RunFolder) -> None:
    with pytest.raises(PermissionError), folder.noting_errors():
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_run_that_cannot_be_written_can_be_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: RunFolder, described: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def begin() -> RunFolder:
        return RunFolder.create(tmp_path / "run", convert({"model": "m"}), workflow=None, tasks=None)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(RunFolder, "describe_as", full)
        begin()
    assert not (tmp_path / "run").exists()
    begin().close()
