"""The command line: its parser, its exit statuses, and that errors go to stderr, one line each."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from cotune.cli import main as cli
from cotune.cli.command import parse_prices
from cotune.cli.removed import REMOVED_FLAGS
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.reading.evaluations import StoredEvaluation
from cotune.reading.headline import Headline, role_rewards
from cotune.reading.metrics import columns
from cotune.trainer import train as train_module
from cotune.trainer.config import load as train_config
from cotune.trainer.prompts.options import ImproveOptions
from cotune.trainer.reporting.summary import RunSummary
from tests.test_surface import forms_of, leaves

COMMANDS = ("trace", "train", "eval", "export", "serve", "show")


@pytest.fixture(autouse=True)
def _process_state(monkeypatch):
    """What `main` sets for its process stays in the test."""
    monkeypatch.setattr(logging, "basicConfig", lambda **kwargs: None)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"cotune {command}" in said
    assert "Example:" in said


@pytest.mark.parametrize("columns", [70, 76, 80, 90, 100])
def test_help_breaks_no_path(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    paths = re.findall(r"docs/\S*", said_by_help(capsys, "train", "--help"))
    assert "docs/how-to/distillation.md" in paths and all(".md" in path for path in paths)


def test_the_module_tells_its_version():
    done = subprocess.run([sys.executable, "-m", "cotune", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"cotune {version('cotune')}\n"


def test_training_explains_its_columns_and_trains_nothing(capsys):
    assert cli.main(["train", "--explain"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in (*(one.column for one in columns().values()), "left out", "held-out", "failed episodes"):
        assert name in said
    assert "no spread Share of groups whose rewards are all equal." in said


def said_by_help(capsys, *words):
    with pytest.raises(SystemExit):
        cli.main(words)
    return capsys.readouterr().out


def test_help_is_one_screen_with_every_command_in_its_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = said_by_help(capsys, "--help").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    groups = {}
    for line in lines[lines.index("Start:") : lines.index("options:")]:
        if line.startswith("  "):
            groups[list(groups)[-1]].append(line.split()[0])
        elif line:
            groups[line.rstrip(":")] = []
    assert groups == {
        "Start": ["doctor", "check", "trace"],
        "Train": ["train", "eval", "prompts"],
        "Look": ["show", "view", "blame", "replay"],
        "Use": ["export", "serve"],
        "Collect": ["gateway", "collect", "records", "otel"],
    }


@pytest.mark.parametrize(("columns", "widest"), [("72", 72), ("120", 100)])
def test_help_is_as_wide_as_the_terminal(columns, widest, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    lines = said_by_help(capsys, "train", "--help").splitlines()
    assert widest - 10 < max(len(line) for line in lines if not line.startswith("  cotune")) <= widest


def test_only_the_command_that_is_asked_for_is_imported():
    code = (
        "import sys; from cotune.cli.main import COMMANDS, parser; parser(['doctor', 'x'])\n"
        "print([name for group in COMMANDS.values() for name in group if f'cotune.cli.{name}' in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "['doctor']"


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 0
    assert "cotune train app:solve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [(["tarin"], "train"), (["-v", "evla", "app:solve"], "eval"), (["xyzzy"], "cotune --help lists the commands.")],
)
def test_a_mistyped_command_gets_a_suggestion(arguments, remedy, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert remedy in capsys.readouterr().err.partition("is not a command")[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["trace", "app:solve", "--task", "tasks.jsonl"],
            "--task is not a flag of this command. Did you mean --tasks?",
        ),
        (["prompts", "improve", "app:solve", "--reflectoin=m"], "Did you mean --reflection"),
        (["records", "list", "runs", "--xyzzy"], "--xyzzy is not a flag of this command. --help lists the flags."),
    ],
)
def test_a_mistyped_or_shortened_flag_gets_a_suggestion(arguments, said, capsys):
    """None is taken for another one, which may cost calls of a provider."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["check", "app:solve", "--answer", "x"], "check: --answer was removed. Use --answers: "),
        (["check", "app:solve", "--answer=x"], "check: --answer was removed. Use --answers: "),
        (
            ["-v", "train", "app:solve", "--strategy", "p, w"],
            "train: --strategy was removed. Run cotune prompts improve",
        ),
        (["train", "app:solve", "--seed", "1"], "train: --seed was removed. Use --set seed=N."),
        (["prompts", "improve", "--rounds", "3"], "prompts improve: --rounds was removed. Use --set rounds=N."),
    ],
)
def test_a_removed_flag_names_its_replacement(arguments, remedy, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("runs", "runs was removed. Use cotune show FOLDER."),
        ("score", "score was removed. Use cotune records score."),
        ("judge", "judge was removed. Use cotune records judge."),
        ("sft", "sft was removed. Use cotune records sft."),
        ("report", "report was removed. Use cotune show RUN --html FILE."),
    ],
)
def test_a_removed_command_names_its_replacement(command, remedy, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "runs/r1"])
    assert ended.value.code == 2
    assert remedy in capsys.readouterr().err


FIELDS = {
    "train": set(leaves(TrainConfig)),
    "check": set(leaves(TrainConfig)),
    "prompts improve": set(leaves(ImproveOptions)),
}


@pytest.mark.parametrize("row", REMOVED_FLAGS)
def test_what_replaces_a_removed_flag_exists(row):
    command, _, flag = row.rpartition(" ")
    (form,) = (form for form in forms_of(cli.parser()) if form.prog == f"cotune {command}")
    present = {flag for action in form._actions for flag in action.option_strings}
    assert flag not in present
    remedy = REMOVED_FLAGS[row]
    for field in re.findall(r"--set ['\"]?([\w.]+)=", remedy):
        assert field in FIELDS[command]
    if command == "prompts improve" or "--set" in remedy:
        return
    assert all(flag in present for flag in re.findall(r"(?<=Use )--[\w-]+", remedy))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plan.select=sample", "sample"),
        ("concurrency=4", 4),
        ("sampling.max_tokens=12", 12),
        ("seed=9", 9),
        ("on_failure=reward:-1", "reward:-1"),
        ("roles_by=app:who", "app:who"),
        ("redact=privacy:hide", "privacy:hide"),
        ("mode=async", "async"),
        ("records.since=2026-11-30", "2026-11-30"),
        ("records.since=7d", "7d"),
        ("records.app=desk", "desk"),
        ("records.labels=runs/r 1/notes.jsonl", "runs/r 1/notes.jsonl"),
        ("records.min_reward=1", 1.0),
        ('loggers=["tensorboard", "wandb"]', ("tensorboard", "wandb")),
    ],
)
def test_a_field_without_a_flag_is_set_by_name(trained, text, value):
    words = ["--set", text]
    if text.startswith("records."):
        recipe = "dpo" if text.startswith("records.labels") else "sft"
        words += ["--recipe", recipe, "--records", "runs/traced"]
    assert cli.main(["train", "app:solve", "--tasks", "t.jsonl", "--model", "base", *words]) == 0
    found = trained.config
    for part in text.partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("arguments", [["tarin"], ["trace", "app:solve"], ["train", "--policies", "both"]])
def test_wrong_usage_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: cotune" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "cotune train: workflow is missing. Name one, as in "),
        (["train", "a:b", "--tasks", "t", "--set", "x"], "cotune train: --set = 'x' must be FIELD=VALUE."),
        (
            ["train", "a:b", "--tasks", "t", "--model", "m", "--set", "prompts.rounds=8"],
            "cotune train: prompts.rounds = 8 is an option of searches for prompts, and a run searches for none. ",
        ),
        (["train", "--resume", "nowhere"], "cotune train: nowhere holds no run: there is no run.json."),
        (["trace", "nowhere:solve", "--tasks", "t"], "cotune trace: app = 'nowhere:solve' must be a module"),
        (["export", "nowhere", "--out", "there"], "cotune export: nowhere holds no run"),
        (["show", "nowhere"], "cotune show: "),
        (["serve", "./nowhere"], "cotune serve: "),
    ],
)
def test_errors_are_status_1_and_one_line_on_stderr(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert all(line.endswith(" ...") for line in out.splitlines()), "only what is being loaded"
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_prices_are_per_million_prompt_and_completion_tokens():
    assert parse_prices(["gpt-4o-mini=0.15/0.6", "own=2"]) == {"gpt-4o-mini": (0.15, 0.6), "own": (2.0, 2.0)}


@pytest.mark.parametrize("given", ["gpt", "gpt=", "gpt=cheap", "gpt=1/2/3"])
def test_a_price_that_is_none_is_named(given):
    with pytest.raises(ConfigError, match=r"--price = .*MODEL=PROMPT/COMPLETION, in money per million tokens"):
        parse_prices([given])


def test_interrupted_is_status_130(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "resume", interrupted)
    assert cli.main(["train", "--resume", "r"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_failing_disk_is_no_traceback(monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train_module, "resume", full)
    assert cli.main(["train", "--resume", "r"]) == 1
    assert capsys.readouterr().err == (
        "cotune train: The disk is full: no more can be written. Free some space, then run the command again.\n"
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["check", "--json", "{file}/x.json"], "{file}/x.json cannot be used: Not a directory. Name another path"),
        (["trace", "--out", "{file}"], "{file} cannot be written: File exists. Name another --out.\n"),
        (
            ["train", "--model", "m", "--out", "{file}"],
            "{file} cannot be used as a run folder: File exists. ",
        ),
    ],
)
def test_a_path_that_cannot_be_written_is_named_without_a_number(command, said, tmp_path, capsys):
    (app := tmp_path / "app.py").write_text("import cotune\n\n@cotune.workflow\ndef solve(task):\n    return 1.0\n")
    (tasks := tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    given = [str(model) if part == "m" else part.format(file=tasks) for part in command]
    assert cli.main([given[0], f"{app}:solve", "--tasks", str(tasks), *given[1:]]) == 1
    assert capsys.readouterr().err.startswith(f"cotune {command[0]}: {said.format(file=tasks)}")


@pytest.fixture
def trained(monkeypatch):
    """What `cotune train` hands to `train`."""
    seen = SimpleNamespace(finished=True, versions={"planner": 3}, stayed={}, held_out="", path="runs/r1")

    def train(workflow, tasks, config, *, out, profile):
        seen.workflow, seen.tasks, seen.config, seen.run, seen.profile = workflow, tasks, config, out, profile
        of = StoredEvaluation(evaluations={}, name="in training, after step 3")
        lines = [{"step": step, "roles": {"planner": {"reward": 0.25 + step / 4}}} for step in range(3)]
        return RunSummary(
            finished=seen.finished,
            steps=3,
            seconds=1.4,
            path=seen.path,
            headline=Headline(changes=tuple(role_rewards(lines)), verdict="better", evaluation=of),
            calls=9,
            candidates=9,
            groups=3,
            left_out={},
            lost_records=0,
            versions=seen.versions,
            stayed=seen.stayed,
            held_out=seen.held_out,
        )

    monkeypatch.setattr(train_module, "train", train)
    return seen


def test_flags_of_train_become_its_configuration(trained, capsys):
    flags = (
        "--model base --policies full --plan tree -k 8 --recipe grpo --steps 3 --tasks-per-step 16 --lr 3e-3"
        " --set plan.select=sample --set concurrency=4 --set sampling.max_tokens=12 --set seed=9 --set lora.rank=8"
        " --set schedule.kind=linear --out runs/r1"
    )
    assert cli.main(["train", "app:solve", "--tasks", "t.jsonl", *flags.split()]) == 0
    assert (trained.workflow, trained.tasks, trained.run) == ("app:solve", "t.jsonl", "runs/r1")
    assert trained.profile is False
    assert trained.config == train_config.convert(
        {
            "model": "base",
            "policies": "full",
            "plan": {"kind": "tree", "k": 8, "select": "sample"},
            "recipe": "grpo",
            "steps": 3,
            "tasks_per_step": 16,
            "concurrency": 4,
            "learner": {"lr": 0.003},
            "sampling": {"max_tokens": 12},
            "seed": 9,
            "lora": {"rank": 8},
            "schedule": {"kind": "linear"},
        }
    )
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "loading app:solve ...",
        "finished after 3 steps in 1 s: runs/r1",
        "reward of planner: 0.25 in step 1, 0.75 in step 3",
        "better (in training, after step 3)",
    ]


def said_at_the_end(capsys, status=0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        assert cli.main(["train", "app:solve", "--tasks", "t.jsonl", "--model", "base"]) == status
    return capsys.readouterr().out.partition("next: ")[2].splitlines()


def test_the_next_command_names_the_held_out_tasks_of_the_run(trained, capsys):
    trained.held_out = "data/h.jsonl"
    assert said_at_the_end(capsys) == [
        "cotune eval app:solve --run runs/r1 --tasks data/h.jsonl",
        "  or: cotune export runs/r1 --out adapters/",
        "  or: cotune view runs/r1",
    ]


def test_the_next_command_of_a_stopped_run_continues_it(trained, capsys):
    trained.finished = False
    assert said_at_the_end(capsys, 130) == ["cotune train --resume runs/r1"]


def test_the_next_command_takes_the_best_checkpoint_where_one_is_kept(trained, capsys, tmp_path):
    trained.path = str(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.json").write_text('{"planner": {"checkpoint": "step-000002", "figure": 0.5}}')
    assert f"  or: cotune export {tmp_path} --out adapters/ --step best" in said_at_the_end(capsys)


def test_a_run_that_has_updated_nothing_says_so_and_not_to_export_it(trained, capsys):
    trained.versions, trained.stayed = {}, {"planner": {"no signal": 2, "no sample": 1}, "coder": {"no sample": 3}}
    assert cli.main(["train", "app:solve", "--tasks", "t.jsonl", "--model", "base"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[4:] == [
        "never updated: planner (no signal in 2 of 3 steps, no sample in 1), coder (no sample in 3 of 3 steps)",
        "planner: no signal, as all rewards that were compared are equal. Where nothing succeeds yet, learn from "
        "demonstrations first (cotune train WORKFLOW --recipe sft --records TRACED, then --init with that run), take "
        "tasks that are solved now and then, or a larger plan.k; else a scorer or judge that tells answers apart.",
    ]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train", "-k K candidates per call (tree), per forked call (replay), or episodes per task (independent)"),
        (
            "train",
            "--policies {shared,lora,full} shared: one adapter for all roles | lora: one adapter per role | full:",
        ),
        ("train", "--plan {tree,independent,replay} tree | independent | replay (see"),
        ("train", "--lr LR learning rate of AdamW; default: 5e-6 for a LoRA, 1e-6 for all weights"),
        (
            "train",
            "--tasks-per-step N tasks of a step; recorded episodes if the run learns from records (default: 32)",
        ),
        ("train", "--eval-tasks FILE JSON-lines file of held-out tasks"),
        ("check", "--model MODEL count tokens with this model's tokenizer; it is not loaded"),
        ("trace", "--roles-by WHO module:function or file.py:function that names the role of each call"),
        ("gateway", "--redact MODULE:FUNCTION module:function or file.py:function that gets each message"),
    ],
)
def test_a_flag_says_what_its_field_says(command, said, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("flags", [["-k", "many"], ["--lr", "fast"], ["--steps", "1.5"]])
def test_a_flag_takes_what_its_field_takes(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "app:solve", "--tasks", "t.jsonl", *flags])
    assert ended.value.code == 2
    assert flags[1] in capsys.readouterr().err


def test_flags_go_before_the_file(trained, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('model = "base"\nsteps = 7\nseed = 1\n[plan]\nk = 2\n')
    assert cli.main(["train", "a:b", "--tasks", "t", "--config", str(file), "--steps", "9"]) == 0
    config = trained.config
    assert (config.model, config.steps, config.seed, config.plan.k) == ("base", 9, 1, 2)


def test_a_stopped_run_is_status_130(trained, capsys):
    trained.finished = False
    assert cli.main(["train", "a:b", "--tasks", "t", "--model", "m"]) == 130
    assert capsys.readouterr().out.splitlines()[:2] == ["loading a:b ...", "stopped after 3 steps in 1 s: runs/r1"]


@pytest.mark.parametrize(
    ("table", "field", "value", "allowed"),
    [
        ({}, "model", None, "a model folder, a GGUF file or a Hugging Face id"),
        ({"model": "m", "recipe": "ppo"}, "recipe", "ppo", "at_grpo, c3, c3_branches"),
        ({"model": "m", "steps": 0}, "steps", 0, "a number above 0"),
        ({"model": "m", "episode_timeout": -1.0}, "episode_timeout", -1.0, "a number above 0"),
        ({"model": "m", "probe_bound": 0.0}, "probe_bound", 0.0, "a number above 0"),
        ({"model": "m", "sampling": {"timeout": 9.0}}, "sampling.timeout", 9.0, "was removed"),
        ({"model": "m", "schedule": {"warmup": 5}}, "schedule.warmup", 5, "was removed"),
        ({"model": "m", "learner": {"grad_clip": 2.0}}, "learner.grad_clip", 2.0, "was removed"),
        ({"model": "m", "steps": "many"}, "steps", "many", "a whole number, not text"),
        ({"model": "m", "plan": {"kind": "bush"}}, "plan.kind", "bush", "one of independent, replay, tree"),
        ({"model": "m", "sampling": {"temperature": 0}}, "sampling.temperature", 0, "above 0"),
        ({"model": "m", "learner": {"lr": -1.0}}, "learner.lr", -1.0, "above 0"),
        ({"model": "m", "policy": [{"name": "p", "roles": ["a"], "lora": {"rank": 0}}]}, "lora.rank", 0, "above 0"),
        ({"model": "m", "cluster": {"gpus_per_engine": -1}}, "cluster.gpus_per_engine", -1, "0 or more"),
        (
            {"model": "m", "evaluation": {"keep_best": True, "tasks": "none"}},
            "evaluation.keep_best",
            True,
            "has no effect with evaluation.tasks = 'none'",
        ),
        ({"model": "m", "stepz": 3}, "stepz", 3, "is not a field"),
        ({"model": "m", "lora": {"rnak": 3}}, "lora.rnak", 3, "is not a field"),
        (
            {"model": "m", "policy": [{"name": "p", "roles": ["a"], "kind": "big"}]},
            "policy[0].kind",
            "big",
            "one of frozen, full, lora, provider",
        ),
    ],
)
def test_a_wrong_setting_is_named(table, field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        train_config.convert(table)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert allowed in caught.value.fault


@pytest.mark.parametrize(
    ("table", "remedy"),
    [
        ({"k": 2}, "It belongs elsewhere: plan.k."),
        ({"lr": 1e-4}, "It belongs elsewhere: learner.lr."),
        ({"rank": 8}, "It belongs elsewhere: lora.rank."),
        ({"teacher": "t"}, "It belongs elsewhere: distill.teacher."),
        ({"clip_high": 0.3}, "It belongs elsewhere: loss.clip_high."),
        ({"plan": {"steps": 5}}, "It belongs elsewhere: steps (at the top of the file, above the first [table])."),
        ({"learner": {"lora": {"rank": 2}}}, "It belongs elsewhere: lora (at the top"),
        ({"stepz": 5}, "Did you mean steps? See docs"),
        ({"zzz": 5}, "See docs"),
    ],
)
def test_a_field_at_the_wrong_level_names_its_place(table, remedy):
    with pytest.raises(ConfigError, match="is not a field") as caught:
        train_config.convert({"model": "m", **table})
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(("text", "allowed"), [(None, "does not exist"), ("steps = ", "is not valid TOML")])
def test_a_configuration_that_cannot_be_read(text, allowed, tmp_path):
    file = tmp_path / "run.toml"
    if text:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        train_config.load_config(file, {})
    assert (caught.value.field, caught.value.value) == ("config", str(file))
    assert caught.value.fault.startswith(allowed)


def test_the_command_line_opens_without_torch():
    code = "import sys, cotune.cli.main as c; c.parser(); print({'torch', 'openai'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "app:solve", "--tasks", "none.jsonl", "--model", "base/"], "loading app:solve ..."),
        (["train", "--resume", "runs/r1"], "opening the run runs/r1 ..."),
        (["eval", "app:solve", "--tasks", "none.jsonl", "--run", "runs/r1"], "loading app:solve and runs/r1 ..."),
        (["serve", "adaptors/"], "loading adaptors/ ..."),
    ],
)
def test_what_is_waited_for_is_said_before_anything_heavy_is_imported(command, said, tmp_path):
    code = (
        "import sys, cotune.cli.main, cotune.cli.train, cotune.cli.eval, cotune.cli.servers.serve\n"
        "def first(what):\n"
        "    print(what, sorted({'torch', 'transformers', 'starlette'} & set(sys.modules)))\n"
        "    raise KeyboardInterrupt\n"
        "cotune.cli.train.tell = cotune.cli.eval.tell = cotune.cli.servers.serve.tell = first\n"
        f"sys.exit(cotune.cli.main.main({command!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == f"{said} []\n", done.stderr
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
