"""Checkpoints: whole or not there, wherever writing them is cut off."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from cotune.errors import RunError
from cotune.records.policies import LoraSpec, policies_for
from cotune.storage.checkpoints import Best, read_best
from cotune.storage.run_layout import RunDescription
from cotune.trainer.run import checkpoint as module
from cotune.trainer.run.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, tidy_checkpoints

POLICIES = policies_for("lora", ["a", "b"], LoraSpec())


@pytest.fixture(autouse=True)
def run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints are those of the run "r"."""
    monkeypatch.setattr(module, "is_run", lambda path: True)
    monkeypatch.setattr(module, "read_run", lambda path: RunDescription(id="r"))


class Learner:
    """Writes a file that says at which step it was written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def save(self, folder: Path) -> None:
        (folder / "learner").write_text(str(self.step))


def save(folder: Path, step: int, keep: int = 2, **best: Best) -> None:
    checkpoint = Checkpoint(steps=step, run="r", versions={"a": step}, policies=POLICIES)
    with mock.patch.object(module, "KEPT_CHECKPOINTS", keep):
        save_checkpoint(folder, checkpoint, Learner(step), best=best)


def loaded(folder: Path) -> int | None:
    """The step of the newest checkpoint, which must be whole."""
    found = load_checkpoint(folder)
    if found is None:
        return None
    checkpoint, path = found
    assert (path / "learner").read_text() == str(checkpoint.steps)
    assert (path / "policies.json").is_file()
    assert checkpoint.versions == {"a": checkpoint.steps}
    return checkpoint.steps


def test_saved_and_loaded(tmp_path):
    assert load_checkpoint(tmp_path) is None
    save(tmp_path, 3)
    checkpoint, path = load_checkpoint(tmp_path)
    assert checkpoint.versions == {"a": 3}
    assert checkpoint.policies == POLICIES
    assert path == tmp_path / "step-000003"


def test_only_the_newest_are_kept(tmp_path):
    for step in range(5):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.glob("*")) == ["latest", "step-000003", "step-000004"]


def test_going_back_to_an_older_one(tmp_path):
    for step in range(5):
        save(tmp_path, step, keep=9)
    (tmp_path / "latest").write_text("step-000001")
    assert loaded(tmp_path) == 1
    save(tmp_path, 2, keep=1)
    assert loaded(tmp_path) == 2
    save(tmp_path, 3, keep=1)
    assert loaded(tmp_path) == 3


class Cut(BaseException):
    """The process is gone."""


def half_removed(folder, remove=shutil.rmtree):
    """What a kill within leaves."""
    next(file for file in folder.iterdir() if file.is_file()).unlink()
    raise Cut


def whole(step):
    return {"learner", "checkpoint.json", "policies.json", "hashes.json"} == {path.name for path in step.iterdir()}


@pytest.mark.parametrize(("step", "better"), [(3, True), (3, False), (2, False)])
@pytest.mark.parametrize("within", [False, True])
def test_cut_off_anywhere(tmp_path, monkeypatch, step, better, within):
    """Ends the process before the first, second, ... change to the disk, or `within` the removal of a folder."""
    count, limit = 0, 0

    def counted(change):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count > limit:
                raise Cut
            return change(*args, **kwargs)

        return wrapped

    first, second = Best("step-000001", 0.5), Best(f"step-{step:06d}", 0.75)
    save(tmp_path / "start", 1, policy=first)
    save(tmp_path / "start", 2, keep=1, policy=first)
    seen = set()
    for name in ("mkdir", "rename", "replace", "open"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    remove = shutil.rmtree

    def removed(folder):
        if within and count >= limit:
            half_removed(folder)
        return counted(remove)(folder)

    monkeypatch.setattr(module.shutil, "rmtree", removed)
    for cut in range(100):
        limit = 10**9
        folder = tmp_path / str(cut)
        shutil.copytree(tmp_path / "start", folder)
        count, limit = 0, cut
        try:
            save(folder, step, keep=1, policy=second if better else first)
            done = True
        except Cut:
            done = False
        limit = 10**9
        assert all(whole(path) for path in folder.glob("step-*"))
        best = read_best(folder)["policy"]
        assert (folder / best.checkpoint).is_dir() and best in (first, second)
        tidy_checkpoints(folder)
        assert not list(folder.glob(".step-*"))
        found = loaded(folder)
        seen.add(found)
        assert found == step if done else found in (2, step)
        save(folder, found + 1, policy=best)
        assert loaded(folder) == found + 1
        if done:
            break
    assert done
    assert cut > 10
    assert seen == {2, step}


def test_a_broken_checkpoint_names_the_way_out(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-000001" / "checkpoint.json").write_text("{")
    with pytest.raises(RunError) as caught:
        load_checkpoint(tmp_path)
    assert f"The checkpoint {tmp_path / 'step-000001'} is broken: checkpoint.json has SHA-256" in caught.value.cause
    assert caught.value.remedy == "No other checkpoint of this run is whole: start a new run."


@pytest.mark.parametrize("name", ["learner", "checkpoint.json", "policies.json", "hashes.json"])
def test_one_flipped_byte_anywhere_is_refused_and_the_one_before_is_offered(tmp_path, name):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    for step in (2, 3):
        file = tmp_path / f"step-{step:06d}" / name
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
    with pytest.raises(RunError) as caught:
        load_checkpoint(tmp_path)
    assert "step-000003 is broken" in caught.value.cause
    assert caught.value.remedy == (
        f"Continue from step-000001, which is whole: echo step-000001 > {tmp_path / 'latest'}, and --resume."
    )
    (tmp_path / "latest").write_text("step-000001\n")
    assert loaded(tmp_path) == 1


def test_a_missing_file_and_a_name_that_leads_outside_are_refused(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-000002" / "learner").unlink()
    with pytest.raises(RunError, match=r"learner is missing.*Continue from step-000001"):
        load_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("../../elsewhere")
    with pytest.raises(RunError, match=r"hashes.json cannot be read: No such file.*Continue from step-000001"):
        load_checkpoint(tmp_path)
