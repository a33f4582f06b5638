"""A run under edited prompts: trained, resumed, evaluated, replayed and exported with them, whatever becomes of the
file that they came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.manifest import read_manifest
from cotune.cli.main import main
from cotune.errors import AdapterError
from cotune.prompts.file import read_prompts, write_prompts
from cotune.storage.open_store import open_store
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.export import export
from tests.integrations.edits import part, prompts
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS

pytestmark = pytest.mark.slow

APP = "tests.trainer.replay_app:solve"
EDITS = prompts(part(["say ", 1], ["please spell ", 1], role="first", kind="user"))


def test_training_to_export(trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_prompts(tmp_path / "prompts.json", EDITS)
    trainer(APP, steps=1, plan={"kind": "independent", "k": 2}, prompts_file=str(file))
    file.unlink()
    run = trainer.folder / "run"
    trainer.resume(None, steps=2)
    assert (json.loads((run / "run.json").read_text())["prompts"], read_prompts(run).id) == (EDITS.id, EDITS.id)
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip() / "checkpoint.json"
    assert json.loads(newest.read_text())["prompts"] == EDITS.id
    seen = sent(run)
    assert {first for first, _, _ in seen["first"]} == {"say a ", "say b ", "say c "}
    assert {out for _, out, _ in seen["first"]} == {"please spell a ", "please spell b ", "please spell c "}
    assert all(asked == out and not named for asked, out, named in seen["second"])
    assert {named for _, _, named in seen["first"]} == {EDITS.id}

    report = evaluate(run, APP, TASKS, modes=("trained",), temperature=0.0, out=tmp_path / "eval")
    assert any(note.startswith("edited prompts of first: 3 of 3 calls") for note in report.notes)
    assert {out.split()[0] for _, out, _ in sent(tmp_path / "eval")["first"]} == {"please"}

    assert main(["replay", str(run), "--all", "--limit", "2"]) == 0, capsys.readouterr()
    others = write_prompts(
        tmp_path / "others.json", prompts(part(["say ", 1], [1, " again"], role="first", kind="user"))
    )
    with pytest.raises(AdapterError, match="was trained with prompts"):
        export(run, tmp_path / "out", prompts=others)
    export(run, tmp_path / "out")
    write_prompts(run, read_prompts(others))
    with pytest.raises(AdapterError, match=r"run\.json names .*Put the file of the run back"):
        export(run, tmp_path / "again")
    assert read_manifest(tmp_path / "out").prompts == read_prompts(tmp_path / "out").id == EDITS.id


def sent(run: Path) -> dict[str, list[tuple[Any, Any, str]]]:
    """By role, what each call asked and what it sent, and the id of its prompts."""
    with open_store(run / "records.db", read_only=True) as store:
        found: dict[str, list[tuple[Any, Any, str]]] = {}
        for episode in store.episodes():
            for call in store.calls(episode.id):
                texts = [store.message(name)["content"] for name in (call.messages[-1], call.messages_out[-1])]
                found.setdefault(call.role, []).append((texts[0], texts[1], call.prompts))
        return found
