from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

import cotune
import cotune.trainer.export as export_module
from cotune.adapters.manifest import Manifest
from cotune.cli.main import main
from cotune.errors import ConfigError, CotuneError, RunError
from cotune.intervals import Interval
from cotune.prompts.file import read_prompts, write_prompts
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.storage.open_store import open_store
from cotune.trainer.config.from_records import RecordsConfig
from cotune.trainer.config.train import TrainConfig, convert, load_config
from cotune.trainer.prompting import strategy as module
from cotune.trainer.prompting.held_out import HeldOut
from cotune.trainer.prompting.kept import kept_of
from cotune.trainer.prompting.options import ImproveOptions, load_options
from cotune.trainer.prompting.strategy import StrategyReport, render, resume_strategy, run_strategy
from tests.integrations.edits import part, prompts
from tests.trainer.prompting import travel
from tests.trainer.tiny_app import build_base

SPEAKER = "say one letter of the alphabet"
NAMES = ("oak", "elm", "fir", "ash", "yew", "box", "bay", "fig", "nut", "pea")
WORDS = [{"id": f"w{n}", "word": word} for n, word in enumerate(NAMES)]
client = openai.AsyncOpenAI(base_url="http://localhost:9/v1", api_key="none")


@cotune.workflow
async def speak(task: Any) -> float:
    with cotune.role("speaker"):
        messages: Any = [{"role": "system", "content": SPEAKER}, {"role": "user", "content": task["word"]}]
        reply = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
    said = reply.choices[0].message.content or ""
    return said.count("a") / 4


@speak.scorer("speaker")
def says_a(candidate: Any, call: Any, task: Any) -> float:
    return float(candidate.text.count("a"))


def held_out_file(folder: Path, tasks: list[dict[str, Any]]) -> str:
    file = folder / "held_out.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return str(file)


def config(folder: Path, strategy: str, **settings: Any) -> TrainConfig:
    held = held_out_file(folder, [{"id": f"h{n}", "word": f"tree {chr(97 + n)}"} for n in range(20)])
    table = {"model": str(folder / "base"), "strategy": strategy, "evaluation": {"tasks": held}, **settings}
    return convert(table)


class Reflector:
    """Writes one text for all, and stops the search before it where `interrupt` says so."""

    def __init__(self, interrupt: bool = False) -> None:
        self.interrupt, self.asked = interrupt, 0

    async def respond(self, call: LiveCall) -> Answer:
        self.asked += 1
        if self.interrupt:
            raise KeyboardInterrupt
        return travel.answer("<new-text>\nsay a letter that is an a\n</new-text>")


@pytest.mark.slow
def test_weights_then_prompts_on_a_real_model_interrupted_within_a_stage(tmp_path: Path) -> None:
    build_base(tmp_path / "base")
    chosen = config(
        tmp_path,
        "w, p",
        policies="full",
        steps=6,
        tasks_per_step=6,
        plan={"kind": "tree", "k": 8},
        learner={"lr": 5e-3},
        sampling={"max_tokens": 4},
    )
    search = ImproveOptions(max_calls=300, rounds=2, credit=0)
    with pytest.raises(KeyboardInterrupt):
        run_strategy(speak, WORDS, chosen, search, out=tmp_path / "s", reflector=Reflector(interrupt=True))
    reflector = Reflector()
    report = resume_strategy(tmp_path / "s", workflow=speak, tasks=WORDS, reflector=reflector)
    weights, searched = report.stages
    assert report.finished and reflector.asked
    assert weights.held_out is not None and weights.held_out.verdict == "better" and weights.kept
    assert weights.held_out.level == pytest.approx(0.975)
    assert report.run == str(tmp_path / "s" / "1-weights")
    # The search asked the trained policies, from the prompts that they were trained with.
    with open_store(tmp_path / "s" / "2-prompts", read_only=True) as store:
        played = {call.policy for episode in store.episodes(phase="prompts") for call in store.calls(episode.id)}
    assert {(ref.name, ref.version) for ref in played if ref} == {("speaker", 6)}
    assert read_prompts(tmp_path / "s" / "2-prompts").trained_with == "as written"
    assert searched.kept == (report.prompts != "")
    again = resume_strategy(tmp_path / "s", workflow=speak, tasks=WORDS, reflector=Reflector(interrupt=True))
    assert again == report


class Pretended:
    """Searches and trainings that write what the real ones write, and say what they were given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verdicts: str, stopped: int = 0) -> None:
        self.given: list[dict[str, Any]] = []
        self.verdicts, self.stopped, self.ended = iter(verdicts), stopped, ""
        monkeypatch.setattr(module, "improve", self.improve)
        monkeypatch.setattr(module, "train", self.train)
        monkeypatch.setattr(module, "resume_training", self.resume)
        monkeypatch.setattr(module._Stages, "_compared", self.compared)
        for place in (module, importlib.import_module("cotune.trainer.train")):
            monkeypatch.setattr(place, "locate_model", lambda model: Path(model))

    def held_out(self, asked: int) -> HeldOut:
        low, high = (0.1, 0.3) if next(self.verdicts) == "+" else (-0.1, 0.3)
        found = Interval(mean=0.2, low=low, high=high, n=20)
        return HeldOut(
            tasks=20, base=0.2, best=0.4, difference=found, asked=asked, level=0.95, prompt_tokens=(1.0, 1.0)
        )

    def improve(self, workflow: Any, tasks: Any, options: ImproveOptions, **named: Any) -> Any:
        self.given.append({"stage": "p", "run": options.run, "prompts": options.prompts, "options": options})
        found = self.held_out(named["comparisons"])
        write_prompts(named["out"], prompts(part("old", f"new {len(self.given)}")))
        return type("Report", (), {"held_out": found, "verdict": found.verdict, "ended": self.ended})()

    def train(self, workflow: Any, tasks: Any, chosen: TrainConfig, *, out: Path) -> Any:
        self.given.append({"stage": "w", "run": chosen.init or None, "prompts": chosen.prompts or None})
        assert not chosen.strategy and not chosen.evaluation.tasks
        (out / "checkpoints").mkdir(parents=True)
        (out / "run.json").write_text('{"workflow": null}')
        return type("Summary", (), {"finished": len(self.given) != self.stopped, "versions": {"a": 1}})()

    def resume(self, run: Path, **named: Any) -> Any:
        self.given.append({"stage": "w again", "run": None, "prompts": None, "changes": named["changes"]})
        return type("Summary", (), {"finished": True, "versions": {"a": 1}})()

    def compared(self, run: Path, options: ImproveOptions) -> Any:
        async def found() -> HeldOut:
            return self.held_out(3)

        return found()


def begun(tmp_path: Path, strategy: str, **limits: Any) -> StrategyReport:
    search = ImproveOptions(reflection="m", **limits)
    return run_strategy(travel.application(), travel.tasks(30), config(tmp_path, strategy), search, out=tmp_path / "s")


@pytest.mark.parametrize(
    ("verdicts", "third"),
    [("+++", ("2-weights", "1-prompts")), ("-++", ("2-weights", None)), ("+-+", (None, "1-prompts"))],
)
def test_a_stage_starts_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdicts: str, third: tuple[str | None, str | None]
) -> None:
    pretended = Pretended(monkeypatch, verdicts)
    prices = {"m": (1.0, 1.0)}
    report = begun(tmp_path, "p, w, p", max_calls=1000, max_cost=3.0, prices=prices)
    first, second, last = pretended.given
    names = (last["run"] and Path(last["run"]).name, last["prompts"] and Path(last["prompts"]).name)
    assert (first["run"], first["prompts"]) == (None, None) and names == third
    assert second["prompts"] == (str(tmp_path / "s" / "1-prompts") if verdicts[0] == "+" else None)
    # The limits are shared by the two searches, and the second one draws anew.
    assert (first["options"].max_calls, first["options"].max_cost) == (500, 1.5)
    assert (first["options"].seed, last["options"].seed) == (0, 2)
    assert [stage.kept for stage in report.stages] == [verdict == "+" for verdict in verdicts]
    assert read_prompts(tmp_path / "s").id == read_prompts(tmp_path / "s" / "3-prompts").id
    assert render(report)


def test_a_stopped_training_goes_on_within_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = Pretended(monkeypatch, "++", stopped=2)
    report = begun(tmp_path, "p, w")
    assert not report.finished and [stage.letter for stage in report.stages] == ["p"]
    report = resume_strategy(tmp_path / "s", workflow=travel.application(), tasks=travel.tasks(30))
    assert report.finished and [given["stage"] for given in pretended.given] == ["p", "w", "w again"]
    with pytest.raises(ConfigError, match="tasks"):
        resume_strategy(tmp_path / "s", workflow=travel.application(), tasks=travel.tasks(29))
    with pytest.raises(RunError, match="cotune train --resume"):
        begun(tmp_path, "p, w")


def test_a_resumed_run_takes_the_changes_that_its_stages_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = Pretended(monkeypatch, "+-+", stopped=2)
    begun(tmp_path, "p, w, p", max_calls=100)
    given: dict[str, Any] = {"workflow": travel.application(), "tasks": travel.tasks(30)}
    for refused in ({"changes": {"seed": 3}}, {"changes": {"evaluation.tasks": "other"}}, {"search": {"minibatch": 9}}):
        with pytest.raises(ConfigError, match=r"was .* when"):
            resume_strategy(tmp_path / "s", **given, **refused)
    with pytest.raises(ConfigError, match="is no option of a search"):
        resume_strategy(tmp_path / "s", **given, search={"max_call": 9})
    report = resume_strategy(tmp_path / "s", **given, changes={"steps": 7, "strategy": "p, w, p"}, search={"rounds": 3})
    assert report.finished
    _, _, again, last = pretended.given
    assert again["changes"] == {"steps": 7} and last["options"].rounds == 3 and last["options"].max_calls == 50


def test_a_last_search_that_ended_at_a_limit_goes_on_under_a_higher_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended = Pretended(monkeypatch, "+-")
    pretended.ended = "The search has reached max_calls = 100"
    begun(tmp_path, "p", max_calls=100)
    given: dict[str, Any] = {"workflow": travel.application(), "tasks": travel.tasks(30)}
    assert resume_strategy(tmp_path / "s", **given).prompts and len(pretended.given) == 1
    report = resume_strategy(tmp_path / "s", **given, search={"max_calls": 200})
    assert [one["options"].max_calls for one in pretended.given] == [100, 200]
    # The longer search found that its prompts are no better.
    assert not report.prompts and not (tmp_path / "s" / "prompts.json").exists()


def _fails(change: Callable[[TrainConfig], TrainConfig], **search: Any) -> Callable[[Path], None]:
    def begin(folder: Path) -> None:
        options = ImproveOptions(**{"reflection": "m", **search})
        chosen = change(config(folder, "p, w"))
        run_strategy(travel.application(), travel.tasks(30), chosen, options, out=folder / "s")

    return begin


def _with(**fields: Any) -> Callable[[TrainConfig], TrainConfig]:
    return lambda chosen: msgspec.structs.replace(chosen, **fields)


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (_fails(_with(strategy="p, x")), r"strategy.*'x'.*p, a search for prompts, or w"),
        (_fails(_with(evaluation=TrainConfig(model="m").evaluation)), "evaluation.tasks.*--eval-tasks"),
        (_fails(_with(), reflection=None), "reflection.*--reflection gpt"),
        (_fails(_with(), model="m"), "prompts.model"),
        (_fails(_with(), redact="app:clean"), "prompts.redact.*--redact"),
        (_fails(_with(recipe="sft", records=RecordsConfig(path="runs/traced"))), "recipe.*learns from records"),
        (_fails(_with(init="runs/none")), "init.*runs/none"),
    ],
)
def test_what_cannot_work_is_refused_before_work_starts(
    tmp_path: Path, begin: Callable[[Path], None], said: str
) -> None:
    with pytest.raises(CotuneError, match=said):
        begin(tmp_path)
    assert not (tmp_path / "s").exists()


def test_one_file_configures_trainings_and_searches(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\nstrategy = "w, p"\n[prompts]\nreflection = "big"\nprompts = "runs/p0"\n')
    assert (load_config(file, {}).strategy, load_config(file, {}).prompts) == ("w, p", "runs/p0")
    assert load_options(file, {}).reflection == "big"
    file.write_text('model = "m"\nprompts = "runs/p0"\n')
    assert load_options(file, {}).prompts == "runs/p0"
    with pytest.raises(ConfigError, match=r"strategy.*several stages"):
        cotune.train(travel.application(), travel.tasks(3), model="m", strategy="p, w")


def test_the_command_runs_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = Pretended(monkeypatch, "++")
    (tmp_path / "app.py").write_text("from tests.trainer.prompting import travel\n\nsolve = travel.application()\n")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in travel.tasks(30)))
    held = config(tmp_path, "p, w").evaluation.tasks
    monkeypatch.chdir(tmp_path)
    command = ["train", "app.py:solve", "--tasks", "tasks.jsonl", "--eval-tasks", held, "--strategy", "p, w"]
    assert main([*command, "--model", "base", "--reflection", "m", "--max-calls", "9", "--out", "s"]) == 0
    assert [given["stage"] for given in pretended.given] == ["p", "w"]
    assert json.loads((tmp_path / "s" / "strategy.json").read_text())["app"] == f"{tmp_path / 'app.py'}:solve"


def test_it_is_resumed_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended = Pretended(monkeypatch, "++", stopped=2)
    work, other = tmp_path / "work", tmp_path / "other"
    work.mkdir()
    other.mkdir()
    (work / "begun_elsewhere.py").write_text(
        "from tests.trainer.prompting import travel\n\nsolve = travel.application()\nclean = str.strip\n"
    )
    (work / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in travel.tasks(30)))
    config(work, "p, w")
    write_prompts(work / "first", prompts(part("old", "new")))
    monkeypatch.chdir(work)
    monkeypatch.setattr("sys.path", [*sys.path, str(work)])
    command = ["train", "begun_elsewhere:solve", "--tasks", "tasks.jsonl", "--eval-tasks", "held_out.jsonl"]
    settings = ["--redact", "begun_elsewhere:clean", "--prompts", "first", "--model", "base", "--max-calls", "9"]
    assert main([*command, *settings, "--strategy", "p, w", "--reflection", "m", "--out", "s"]) == 130
    monkeypatch.chdir(other)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(work)])
    monkeypatch.delitem(sys.modules, "begun_elsewhere")
    assert main(["train", "--resume", str(work / "s"), "--steps", "9"]) == 0
    assert pretended.given[-1]["changes"] == {"steps": 9}


def test_an_export_of_the_stages_is_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pretended(monkeypatch, "++-")
    report = begun(tmp_path, "w, p, w")
    assert kept_of(tmp_path / "s") == (Path(report.run), Path(report.prompts))
    asked: list[Any] = []
    monkeypatch.setattr(export_module, "prompts_for", lambda run, prompts, **_: asked.append((run, prompts)))
    empty = Manifest(format=1, cotune="", created="", policies=(), roles=())
    monkeypatch.setattr(export_module, "export_run", lambda run, out, **_: empty)
    export_module.export(tmp_path / "s", tmp_path / "out")
    assert asked == [(tmp_path / "s" / "1-weights", tmp_path / "s" / "2-prompts")]
    Pretended(monkeypatch, "-")
    search = ImproveOptions()
    run_strategy(travel.application(), travel.tasks(30), config(tmp_path, "w"), search, out=tmp_path / "t")
    with pytest.raises(RunError, match="kept weights"):
        export_module.export(tmp_path / "t", tmp_path / "out")
