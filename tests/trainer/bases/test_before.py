"""What `cotune check` and `cotune doctor` say of a team of two base models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.integrations.models.chat.formats import load_formats
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.trainer.config.load import convert
from tests.trainer.bases.test_training import evens, team
from tests.trainer.tiny_app import TASKS, application, ask

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


async def offer_tools(task: Any) -> float:
    await ask("first", f"say {task['letter']}", tools=TOOLS)
    await ask("second", f"say {task['letter']}", tools=TOOLS)
    return 1.0


def test_check_renders_each_role_in_the_template_of_its_base(
    tiny_base: Path, other_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    app = application(offer_tools, first=evens, second=evens)
    report = cotune.check(app, TASKS, model=str(tiny_base), policy=team(other_base), tool_format="hermes")
    notes = {one.about: one.text for one in report.findings if one.text.startswith("base ")}
    assert notes == {
        "first": f"base {tiny_base}: 33 tokens, context 256, its template shows no tools, it sees no images.",
        "second": f"base {other_base}: 253 tokens, context 512, its template shows tools, it sees no images.",
    }
    (unshown,) = [one for one in report.findings if "shows no tools, so the model" in one.text]
    assert (unshown.level, unshown.about) == ("blocks", "first")
    counts = {call.role: report.tokens.get(call.id) for call in report.calls if call.turn == 0}
    assert counts["first"] == len("say a") + 3 and counts["second"] > 100  # the tools of the other are in its prompt
    (shared,) = [one for one in report.findings if one.about == "tool_format"]
    assert shared.text == f"tool_format = 'hermes' is taken for several base models: {tiny_base}, {other_base}"
    one, two = team(other_base)
    tables = [one, {**two, "tool_format": "qwen3_coder"}]
    report = cotune.check(app, TASKS, model=str(tiny_base), policy=tables, tool_format="hermes")
    assert not any(one.about == "tool_format" for one in report.findings)
    config = convert({"model": str(tiny_base), "policy": tables, "tool_format": "hermes"})
    chats = load_formats(config.bases, config.tool_formats)
    for policy, name in (("one", "hermes"), ("two", "qwen3_coder")):
        chat = chats.of(policy)
        assert isinstance(chat, ChatTemplate) and chat.tool_format is not None and chat.tool_format.name == name
        assert config.tool_format_of(policy) == name, "what an export is given"
    alone = cotune.check(app, TASKS, model=str(tiny_base), tool_format="hermes")
    assert not any(one.about == "tool_format" for one in alone.findings)
    assert not any(one.text.startswith("base ") for one in alone.findings)


@pytest.mark.parametrize("own", [True, False])
def test_check_names_the_policy_whose_base_is_not_there(tiny_base: Path, tmp_path: Path, own: bool) -> None:
    with pytest.raises(ConfigError, match=r"policy.model = '.*gone' \(the base of policy 'two'\)"):
        cotune.check(application(), TASKS, model=str(tiny_base) if own else None, policy=team(tmp_path / "gone"))


async def say_much(task: Any) -> float:
    await ask("first", f"say {task['letter'] * 300}")
    await ask("second", f"say {task['letter'] * 300}")
    return 1.0


def test_check_refuses_a_prompt_that_is_too_long_for_the_base_of_its_role(
    tiny_base: Path, other_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    app = application(say_much, first=evens, second=evens)
    report = cotune.check(app, TASKS, model=str(tiny_base), policy=team(other_base))
    (blocked,) = [one for one in report.findings if one.level == "blocks"]
    assert blocked.about == "first" and "the model takes" in blocked.text, blocked


def test_doctor_counts_each_base(
    tiny_base: Path, other_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "team.toml"
    tables = "".join(
        f'[[policy]]\nname = "{n}"\nroles = ["{r}"]\n{more}\n'
        for n, r, more in (("one", "first", ""), ("two", "second", f'model = "{other_base}"'))
    )
    config.write_text(f'model = "{tiny_base}"\n{tables}')
    main(["doctor", "--config", str(config), "--json"])
    report = json.loads(capsys.readouterr().out)
    told = {one["about"]: one["text"] for one in report["findings"]}
    assert told["model"].startswith(f"{tiny_base}, 0.00 GB") and told["model of two"].startswith(str(other_base))
    assert [one["process"] for one in report["memory"]] == ["learner", "sampler of base", "sampler of base"]
    config.write_text(config.read_text().replace(str(other_base), str(tmp_path / "gone")))
    assert main(["doctor", "--config", str(config), "--json"]) == 1
    blocked = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] == "blocks"]
    assert [one["about"] for one in blocked] == ["model of two"]
    idle = 'name = "one"\nkind = "frozen"\n'
    config.write_text(f'model = "{tiny_base}"\n[[policy]]\nroles = ["first"]\n{idle}')
    assert main(["doctor", "--config", str(config), "--json"]) == 1
    blocked = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["level"] == "blocks"]
    assert [one["text"] for one in blocked] == ["none is trained: one is frozen"]
