"""Bad input: one clear error before work starts, with what is wrong, what is allowed and the remedy; nothing is left
behind, so that the same command with the mistake put right works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

import cotune
from cotune.adapters.export import export_run
from cotune.adapters.load import load_export
from cotune.errors import AdapterError, ConfigError, Outage, RunError, WorkflowError
from cotune.trainer.before.findings import EPISODES
from cotune.trainer.config.load import convert, load_config
from cotune.trainer.config.resolve import resolve_plan
from cotune.trainer.opening.resume import apply_changes
from cotune.trainer.prompts.options import load_options
from cotune.trainer.train import resume
from tests.trainer.tiny_app import application, ask, build_base, client, converse, letters

BOTH = {"first": letters, "second": letters}


@pytest.fixture
def refused(trainer, tmp_path):
    """Train with bad input: the error, after a check that no run folder was left."""

    def refuse(kind, *args, **settings):
        with pytest.raises(kind) as caught:
            trainer(*args, **settings)
        assert not (tmp_path / "run").exists()
        assert caught.value.remedy
        return caught.value

    return refuse


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the test's own on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_no_such_app(refused):
    error = refused(ConfigError, "no_such_app:solve")
    assert (error.field, error.value) == ("app", "no_such_app:solve")
    assert error.fault.startswith("must be a module on sys.path or in ")
    assert "path/to/app.py:solve" in error.remedy


def test_no_such_file(refused):
    error = refused(ConfigError, "nowhere/app.py:solve")
    assert (error.field, error.value, error.fault) == ("app", "nowhere/app.py:solve", "must be a file that exists")


def test_no_such_name_in_the_app(refused, module):
    text = "import cotune\n@cotune.workflow\ndef solve(task): return 0\n"
    error = refused(ConfigError, f"{module('bad_name_app', text)}:slove")
    assert (error.field, error.value) == ("app", "bad_name_app:slove")
    assert error.fault == "must be a name in bad_name_app; workflows there: solve"
    meant = "Did you mean bad_name_app:solve?"
    assert error.remedy == f"{meant} Decorate a function in bad_name_app with @cotune.workflow."


def test_an_app_that_does_not_import(refused, module):
    error = refused(ConfigError, f"{module('bad_import_app', 'import no_such_package')}:solve")
    assert (error.field, error.value) == ("app", "bad_import_app:solve")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in error.fault


def test_not_a_workflow(refused, module):
    error = refused(WorkflowError, f"{module('bare_app', 'def solve(task): return 0')}:solve")
    assert "is not a workflow" in error.cause
    assert error.remedy == "Decorate the function with @cotune.workflow."


def test_a_broken_line_of_the_tasks(refused, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a"}\n{"id": \n')
    error = refused(ConfigError, application(**BOTH), path)
    assert (error.field, error.value) == ("tasks", f"{path}, line 2")
    assert error.fault.startswith("is not valid JSON (")
    assert error.remedy.startswith("Write one JSON object per line")


def test_no_tasks(refused, tmp_path):
    (tmp_path / "tasks.jsonl").touch()
    for tasks, value in ((tmp_path / "tasks.jsonl", str(tmp_path / "tasks.jsonl")), ([], [])):
        error = refused(ConfigError, application(**BOTH), tasks)
        assert (error.field, error.value, error.fault) == ("tasks", value, "has no task")


@pytest.mark.parametrize(
    ("settings", "field", "allowed", "remedy"),
    [
        (
            {"out": "r"},
            "out",
            "is not a field of the configuration",
            "It is the argument run of cotune.train, --out of cotune train. ",
        ),
        ({"console": 1}, "console", "is not a field of the configuration", "It is an argument of cotune.train. "),
        (
            {"clip_high": 0.3},
            "clip_high",
            "is not a field of the configuration",
            "It belongs elsewhere: loss.clip_high. ",
        ),
        ({"logger": "wandb"}, "logger", "is not a field of the configuration", "Did you mean loggers? "),
        ({"lora": {"rnk": 8}}, "lora.rnk", "is not a field of the configuration", "Did you mean lora.rank? "),
        (
            {"lora.rank": 8},
            "lora.rank",
            "is not a field of the configuration",
            "Here it is a table: lora = {'rank': 8}. ",
        ),
        ({"distill": "on"}, "distill", "a table, not text", "Its fields: distill."),
        ({"lora": {"rank": "x"}}, "lora.rank", "a whole number, not text", "See docs/reference/configuration.md."),
        (
            {"recipe": {"clip_high": 1}},
            "recipe",
            "is not the name of a recipe",
            "Settings of the recipe that a run changes are in [rewards] and [loss]",
        ),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_written(settings, field, allowed, remedy, refused):
    error = refused(ConfigError, application(**BOTH), **settings)
    assert error.field == field and error.fault.endswith(allowed)
    assert error.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("loss.clip_hi", 0.3, "is not a field of the configuration"),
        ("loss.clip_high", "much", "must be a number or nothing, not text"),
        ("loss.clip_high", -1.0, "must be 0 or more"),
        ("loss.ratio", "median", "is not one of none, sequence, token"),
        ("rewards.zero_variance", "x", "must be true or false or nothing, not text"),
        ("policy.loss.clip_high", -1.0, "of policy p must be 0 or more"),
    ],
)
def test_a_wrong_setting_of_a_recipe_is_named_as_it_was_written(setting, value, allowed):
    *in_policy, table, name = setting.split(".")
    tables = {table: {name: value}}
    if in_policy:
        tables = {"policy": [{"name": "p", "roles": ["a"], **tables}]}
    with pytest.raises(ConfigError) as caught:
        resolve_plan(convert({"model": "m", **tables}), [])
    assert (caught.value.field, caught.value.value) == (setting, value)
    assert caught.value.fault.startswith(allowed)
    assert ("Did you mean loss.clip_high" in caught.value.remedy) == (name == "clip_hi")


@pytest.mark.parametrize("name", ["", ".", "lora.", "a..b"])
def test_a_name_with_nothing_between_its_dots_is_no_field(name):
    with pytest.raises(ConfigError, match=r"is not the name of a field, such as lora\.rank\."):
        load_config(None, {"model": "m", name: 1})


def test_two_policies_of_one_name(refused):
    policy = [{"name": "p", "roles": ["first"]}, {"name": "p", "roles": ["second"]}]
    error = refused(ConfigError, application(**BOTH), policy=policy)
    assert (error.field, error.value, error.fault) == ("policy.name", "p", "is the name of two policies")
    assert error.remedy == "Rename one of them."


def test_two_policies_of_one_role(refused):
    policy = [{"name": "p", "roles": ["first"]}, {"name": "q", "roles": ["first"]}]
    error = refused(ConfigError, application(**BOTH), policy=policy)
    assert (error.field, error.value, error.fault) == ("policy.roles", "first", "is in two policies")


def test_k_below_two_with_a_tree(refused):
    error = refused(ConfigError, application(**BOTH), plan={"kind": "tree", "k": 1})
    assert (error.field, error.value) == ("plan.k", 1)
    assert error.fault.startswith("must be 2 or more")


def test_a_tree_without_a_scorer(refused):
    error = refused(ConfigError, application(), plan={"kind": "tree"})
    assert (error.field, error.value) == ("plan.kind", "tree")
    assert error.fault == "needs a scorer; the workflow has none"
    assert "@solve.scorer(role)" in error.remedy
    assert "--plan replay or independent" in error.remedy


def test_a_model_folder_that_is_missing(refused, tmp_path):
    error = refused(ConfigError, application(**BOTH), model=str(tmp_path / "nowhere"))
    assert (error.field, error.value) == ("model", str(tmp_path / "nowhere"))
    assert error.fault == "is not a model folder or GGUF file: there is no such folder"


def test_a_model_without_a_chat_template(refused, tmp_path):
    base = build_base(tmp_path / "bare", template=False)
    error = refused(ConfigError, application(**BOTH), model=str(base))
    assert (error.field, error.value) == ("model", str(base))
    assert error.fault == "has a tokenizer without a chat template"
    assert "chat_template.jinja" in error.remedy


def test_an_unknown_role_in_the_configuration(refused):
    policy = [{"name": "p", "roles": ["first", "secnod"]}]
    error = refused(ConfigError, application(**BOTH), policy=policy)
    assert (error.field, error.value) == ("policy.roles", "secnod")
    assert error.fault == "is not a role of the application: first, second"
    assert "`roles`" in error.remedy


def test_a_role_without_a_policy(refused):
    error = refused(ConfigError, application(**BOTH), policy=[{"name": "p", "roles": ["first"]}])
    assert (error.field, error.value) == ("policy.roles", "second")
    assert 'kind = "frozen"' in error.remedy


def test_scorers_of_unknown_roles_alone(refused):
    error = refused(ConfigError, application(frist=letters))
    assert (error.field, error.value) == ("scorer", "frist")
    assert error.fault == "is not a role of the application; seen in 3 episodes: first, second"
    assert error.remedy.startswith("Did you mean first? Correct the name")


def test_an_app_that_makes_no_call(refused):
    async def silent(task):
        return 1.0

    error = refused(WorkflowError, application(silent, **BOTH))
    assert error.cause == "The workflow 'solve' made no LLM call that cotune can see."
    assert error.remedy.startswith("Call models through the OpenAI SDK")


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        (None, "The workflow 'solve' returned None, which is not a reward."),
        (float("nan"), "The workflow 'solve' returned team = nan, which is not a finite number."),
        ({"team": "good"}, "The workflow 'solve' returned team = 'good', which is not a number."),
    ],
)
def test_a_workflow_that_returns_no_reward(refused, returned, cause):
    async def odd(task):
        await converse(task)
        return returned

    error = refused(WorkflowError, application(odd, **BOTH))
    assert error.cause == cause
    assert error.remedy.startswith("Return ")


def test_a_workflow_that_raises(refused):
    async def raises(task):
        await converse(task)
        return task["no such key"]

    error = refused(WorkflowError, application(raises, **BOTH))
    assert error.cause.startswith("The workflow 'solve' raised KeyError: 'no such key' (")
    assert f"{Path(__file__).name}:" in error.cause
    assert error.cause.endswith("All 16 of the first episodes failed.")
    assert error.remedy.startswith("Fix the workflow. If an answer of the model breaks it")


def test_an_outage_is_named_alone_only_if_every_episode_ended_in_one(refused):
    outages = []

    async def closed_at_first(task):
        await converse(task)
        if not outages:
            outages.append(task)
            raise Outage("The search service is down.", "Start it.")
        return task["no such key"]

    error = refused(WorkflowError, application(closed_at_first, **BOTH))
    assert error.cause.startswith("The workflow 'solve' raised KeyError: 'no such key' (")

    async def closed(task):
        await converse(task)
        raise Outage("The search service is down.", "Start it.")

    error = refused(Outage, application(closed, **BOTH))
    assert (error.cause, error.remedy) == ("The search service is down.", "Start it.")


def test_an_outage_in_every_episode_names_the_call_that_failed_and_the_number_of_episodes(refused):
    async def catches(task):
        await converse(task)
        try:
            with cotune.role("first"):
                tools = [{"type": "web_search"}]  # which no policy has
                await client(os.environ["OPENAI_BASE_URL"]).responses.create(model="m", input="say it", tools=tools)
        except openai.OpenAIError as error:
            raise Outage("The model is down.", "Start it.") from error
        return 1.0

    error = refused(Outage, application(catches, **BOTH))
    assert error.cause.startswith(
        "The model is down. All 3 of the first episodes failed. The call of role 'first' failed"
    )
    assert error.remedy == "Start it."


def test_a_workflow_that_raises_before_any_call_is_looked_at_no_more_than_usual(refused):
    looked = []

    async def raises(task):
        looked.append(task)
        return os.environ["NO_SUCH_VARIABLE"]

    error = refused(WorkflowError, application(raises, **BOTH))
    assert error.cause.startswith("The workflow 'solve' raised KeyError: 'NO_SUCH_VARIABLE' (")
    assert error.remedy == "Fix the workflow."
    assert len(looked) == EPISODES


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        (None, "The scorer of role 'second' returned local = None, which is not a number."),
        (float("nan"), "The scorer of role 'second' returned local = nan, which is not a finite number."),
        (KeyError("gold"), "The scorer of role 'second' raised KeyError: 'gold' ("),
    ],
)
def test_a_scorer_that_gives_no_reward(refused, returned, cause):
    def scorer(candidate, call, task):
        if isinstance(returned, Exception):
            raise returned
        return returned

    error = refused(WorkflowError, application(first=letters, second=scorer))
    assert error.cause.startswith(cause)
    assert "This happened on all 3 calls." in error.cause


def test_prompts_longer_than_the_model(refused):
    async def long(task):
        await ask("first", "x" * 300)
        return 1.0

    error = refused(WorkflowError, application(long, first=letters))
    assert "The call of role 'first' failed: " in error.cause
    assert "The prompt has 303 tokens; the model takes 1 to 255 and one to answer." in error.cause
    assert "Shorten the prompt, or use a model with a longer context." in error.cause


def test_a_mistake_put_right_works_in_the_same_folder(refused, trainer):
    refused(ConfigError, application(frist=letters, secnd=letters))
    assert trainer(application(**BOTH), steps=1).finished
    with pytest.raises(RunError) as caught:
        trainer(application(**BOTH))
    assert caught.value.cause == f"{trainer.folder / 'run'} already holds a run."
    assert caught.value.remedy == "Choose another --out, or continue the run with --resume."


def test_what_was_in_the_folder_before_stays(trainer, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError):
        trainer(application(frist=letters, secnd=letters))
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "run" / "run.json").exists()


HOLDER = """
import sys, cotune.trainer.run.run_folder as f
from cotune.trainer.config.load import convert
folder = f.RunFolder.create(sys.argv[1], convert({"model": "m"}), workflow=None, tasks=None)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_folder_in_use_by_another_process(trainer, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        for attempt in (lambda: trainer(application(**BOTH)), lambda: resume(run, workflow=application(), tasks=["a"])):
            with pytest.raises(RunError) as caught:
                attempt()
            assert caught.value.cause == f"The run {run} is being written by process {holder.pid}."
            assert caught.value.remedy.startswith("Wait until it ends or stop it")
        assert (run / "run.json").exists()
        holder.communicate("")
    assert holder.pid != os.getpid()


def test_an_option_of_a_search_for_prompts_is_refused_for_a_resumed_run():
    with pytest.raises(ConfigError, match="is an option of searches for prompts"):
        apply_changes(convert({"model": "m"}), {"prompts.rounds": 3}, done=0)


def test_weights_are_refused_by_name_for_a_resumed_run_that_has_none():
    with pytest.raises(ConfigError, match=r"rewards\.weights\.local = 1\.0 was None when the run was started"):
        apply_changes(convert({"model": "m"}), {"rewards": {"weights": {"local": 1.0}}}, done=0)


def test_a_run_in_mode_async_cannot_be_repeatable():
    with pytest.raises(ConfigError, match="cannot be used in mode async") as error:
        convert({"model": "m", "mode": "async", "sampling": {"repeatable": True}})
    assert error.value.field == "sampling.repeatable"


@pytest.mark.parametrize(("name", "field"), [("concurrency", "concurrency"), ("minibatch", "prompts.minibatch")])
def test_an_option_of_a_search_is_named_where_it_stands_in_a_file(name, field):
    with pytest.raises(ConfigError, match="must be a whole number") as error:
        load_options(None, {name: "many"})
    assert error.value.field == field


def test_a_search_takes_an_empty_text_above_the_tables_as_none(tmp_path):
    (tmp_path / "run.toml").write_text('model = "m"\nprompts_file = ""\nseed = 3\n')
    options = load_options(tmp_path / "run.toml", {})
    assert (options.prompts_file, options.seed) == (None, 3)


def test_an_unknown_argument_of_a_trace_or_a_deployment_is_refused():
    for call in (cotune.trace, cotune.deployed):
        with pytest.raises(TypeError, match=r"Unknown argument 'redact'\. Did you mean redactor\?"):
            call("somewhere", redact=str)


def test_an_unknown_argument_of_an_export_is_refused(tmp_path):
    for source in (tmp_path, {"first": tmp_path}):
        with pytest.raises(TypeError, match=r"Unknown argument 'mrege'\. Did you mean merge\?"):
            cotune.export(source, tmp_path / "out", mrege=True)


def test_no_run_to_resume(tmp_path):
    with pytest.raises(RunError) as caught:
        resume(tmp_path / "run", workflow=application(), tasks=["a"])
    assert caught.value.cause == f"{tmp_path / 'run'} holds no run: there is no run.json."
    assert not (tmp_path / "run").exists()


def test_an_export_whose_base_does_not_match(trainer, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    trainer(application(**BOTH), steps=1)
    export_run(tmp_path / "run", tmp_path / "export")
    assert load_export(tmp_path / "export").roles.keys() == {"first", "second"}
    other = build_base(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor + torch.ones(()) for name, tensor in tensors.items()}, other / "model.safetensors")
    with pytest.raises(AdapterError) as caught:
        load_export(tmp_path / "export", other)
    assert caught.value.cause.startswith(f"The export was trained on another base: weights of {other} differ")
    assert caught.value.remedy == (
        f"Name the copy of {trainer.base} that it was trained on: --model {trainer.base.name}=FOLDER"
    )
    with pytest.raises(AdapterError):
        load_export(tmp_path / "export", tmp_path / "nowhere")


def test_outside_a_run_the_application_is_what_it_was():
    calls = []

    @cotune.workflow
    def solve(task):
        calls.append(task)
        return task * 2

    assert solve(4) == 8
    assert calls == [4]
