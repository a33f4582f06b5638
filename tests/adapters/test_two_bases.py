"""A team whose roles have different base models: its export, and what answers by it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import cotune
from cotune.adapters.bases import present_paths
from cotune.adapters.export import Origin, TrainedPolicy, write_export
from cotune.adapters.load import load_export
from cotune.adapters.manifest import read_manifest
from cotune.adapters.open_policies import open_local
from cotune.adapters.serving import Endpoint, serving
from cotune.cli.command import parse_moved_models
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplerInfo, SamplingParams, Weights, fingerprint
from cotune.trainer.evaluation.policies import open_evaluated_policies
from tests.adapters.conftest import build_model

pytestmark = pytest.mark.usefixtures("in_thread")

ASKED = [{"role": "user", "content": "hello"}]
SHORT = "{% for message in messages %}[{{ message.role }}] {{ message.content }}<|end|>{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def short_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another vocabulary, another chat template and a shorter context."""
    return build_model(tmp_path_factory.mktemp("models") / "short", 7, template=SHORT, more=("[user]",), positions=96)


@pytest.fixture(scope="module")
def team(
    base: Path, short_base: Path, lora: LoraSpec, adapter: Callable[[int], Weights], policies: list[TrainedPolicy]
) -> list[TrainedPolicy]:
    """The planner on one base, the solver on the other; the shapes of both adapters are alike."""
    solver = dataclasses.replace(policies[0], name="solver", roles=("solver",), model=str(short_base), metrics={})
    return [policies[0], dataclasses.replace(solver, weights=adapter(9), version=5, tool_format="hermes")]


@pytest.fixture(scope="module")
def team_export(team: list[TrainedPolicy], base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "team"
    untrained = TrainedPolicy(name="base", kind="frozen", version=0, roles=(), model=str(base))
    write_export(folder, team, origin=Origin(run="r1"), others=untrained)
    return folder


def greedy(base: Path, adapter: Path | None, tokens: int) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer.encode(tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False))
    model = AutoModelForCausalLM.from_pretrained(base)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    length = len(ids)
    with torch.no_grad():
        while len(ids) < length + tokens:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[length:]


def test_an_export_names_the_base_of_each_policy(team_export: Path, base: Path, short_base: Path) -> None:
    manifest = read_manifest(team_export)
    assert [(policy.name, policy.base.model) for policy in manifest.policies] == [
        ("planner", str(base)),
        ("solver", str(short_base)),
    ]
    first, second = manifest.bases
    assert first.sha256.differences(second.sha256) == ["weights", "config", "tokenizer", "chat_template"]
    assert (first.tool_format, second.tool_format) == ("auto", "hermes")
    assert manifest.other_base == first
    commands = manifest.serve["vllm"]
    assert [command.split()[2] for command in commands] == [str(base), str(short_base)]
    assert ["--port" in command for command in commands] == [False, True] and commands[1].endswith(" --port 8001")
    card = (team_export / "README.md").read_text()
    assert f"| {base.name} |" in card and f"| {short_base.name} |" in card
    config = json.loads((team_export / "solver" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(short_base)


def test_each_policy_is_merged_into_its_own_base(
    team: list[TrainedPolicy], team_export: Path, short_base: Path, tmp_path: Path
) -> None:
    write_export(tmp_path / "merged", team, merge=True)
    merged = greedy(tmp_path / "merged" / "solver", None, 4)
    assert merged == greedy(short_base, team_export / "solver", 4)
    folders = [engine.folder.name for engine in load_export(tmp_path / "merged").engines]
    assert folders == ["planner", "solver"]  # no base is needed


def test_a_base_that_was_moved_is_named_by_the_old_one(
    team_export: Path, base: Path, short_base: Path, tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(short_base, tmp_path / "elsewhere")
    engines = load_export(team_export, {"short": elsewhere}).engines
    assert [engine.folder for engine in engines] == [base, elsewhere]
    with pytest.raises(ConfigError, match=r"does not say which base model it replaces; there are .*tiny, .*short"):
        load_export(team_export, elsewhere)
    with pytest.raises(ConfigError, match=r"model = 'shrt=.*' replaces no base model; there are .*tiny, .*short"):
        load_export(team_export, {"shrt": elsewhere})
    with pytest.raises(AdapterError, match=r"weights.*of .*tiny differ.*--model short=FOLDER"):
        load_export(team_export, {"short": base})


def test_the_last_part_of_a_place_names_a_base_only_if_no_other_has_it() -> None:
    assert present_paths(["x/a", "y/b", "x/a"], {"a": "c"}) == {"x/a": "c", "y/b": "y/b"}
    assert present_paths(["x/a", "x/a"], "c") == {"x/a": "c"}
    assert present_paths([], "c") == {}
    assert present_paths(["x"], None) == {"x": "x"}
    assert present_paths(["x/a", "y/a"], {"x/a": "c"}) == {"x/a": "c", "y/a": "y/a"}
    with pytest.raises(ConfigError, match="is the last part of several base models; there are x/a, y/a"):
        present_paths(["x/a", "y/a"], {"a": "c"})
    assert (parse_moved_models([]), parse_moved_models(["m"]), parse_moved_models(["a=m", "b=n=2"])) == (
        None,
        "m",
        {"a": "m", "b": "n=2"},
    )
    with pytest.raises(ConfigError, match="--model = 'm' must be OLD=NEW"):
        parse_moved_models(["m", "a=n"])


def test_an_evaluation_reads_the_tool_calls_of_each_base(team: list[TrainedPolicy], base: Path, tmp_path: Path) -> None:
    solver = dataclasses.replace(team[1], tool_format="mistral")
    write_export(tmp_path / "export", [team[0], solver])

    async def formats() -> list[str]:
        async with open_evaluated_policies(tmp_path / "export").responder(threads=1) as responder:
            return [responder.chat_of(role).tool_format.name for role in ("planner", "solver")]  # type: ignore[attr-defined]

    assert asyncio.run(formats()) == ["hermes", "mistral"]


def test_one_tool_format_is_not_taken_for_all_bases(team_export: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mistral' would apply to several base models: .*tiny, .*short"):
        asyncio.run(open_local(team_export, tool_format="mistral"))


class Counted:
    """An engine that takes what is published, and says when it is closed."""

    opened = closed = 0
    broken = None

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="counted", max_model_len=64)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        return fingerprint(weights)

    async def aclose(self) -> None:
        Counted.closed += 1


def test_the_other_engines_are_closed_if_one_cannot_be_opened(
    team_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(team_export, tmp_path / "broken")
    manifest = json.loads((broken / "roles.json").read_text())
    manifest["policies"][1]["fingerprint"] = "0" * 64
    (broken / "roles.json").write_text(json.dumps(manifest))

    async def opened(model: str, **_: object) -> Counted:
        Counted.opened += 1
        return Counted()

    monkeypatch.setattr(TransformersSampler, "open", opened)
    with pytest.raises(AdapterError, match="the weights have fingerprint"):
        asyncio.run(open_local(broken))
    assert (Counted.opened, Counted.closed) == (2, 2)


@pytest.fixture(scope="module")
def endpoint(team_export: Path) -> Iterator[Endpoint]:
    with serving(team_export) as running:
        yield running


def said(endpoint: Endpoint, role: str, **more: Any) -> httpx.Response:
    body = {"model": role, "messages": ASKED, "temperature": 0, "max_tokens": 4, "return_token_ids": True, **more}
    return httpx.post(f"{endpoint.url}/chat/completions", json=body, timeout=120)


@pytest.mark.slow
def test_each_role_is_answered_on_its_own_base(
    endpoint: Endpoint, team_export: Path, base: Path, short_base: Path
) -> None:
    for role, own in (("planner", base), ("solver", short_base)):
        assert said(endpoint, role).json()["choices"][0]["token_ids"] == greedy(own, team_export / role, 4)
    refused = said(endpoint, "stranger")
    assert refused.status_code == 404 and "--default" in refused.json()["error"]["message"]
    listed = httpx.get(f"{endpoint.url}/models").json()["data"]
    assert {model["id"]: (model["root"], model["max_model_len"]) for model in listed} == {
        "planner": (str(base), 512),
        "solver": (str(short_base), 96),
    }


@pytest.mark.slow
def test_each_role_has_the_context_length_of_its_base(endpoint: Endpoint) -> None:
    long = [{"role": "user", "content": "x" * 200}]
    assert said(endpoint, "planner", messages=long).status_code == 200
    refused = said(endpoint, "solver", messages=long).json()["error"]
    assert refused["code"] == "context_length_exceeded" and "the model takes 96 tokens" in refused["message"]
    assert said(endpoint, "planner", max_tokens=500).json()["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.long  # test_serve_engine.py kills a real engine, test_versions.py restarts one with trained weights
def test_an_engine_that_ends_is_restarted_without_the_other(
    team_export: Path, caplog: pytest.LogCaptureFixture, short_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_thread = TransformersSampler.open

    async def opened(model: str, **options: Any) -> TransformersSampler:
        return await in_thread(model, **options, host="process" if Path(model) == short_base else "thread")

    monkeypatch.setattr(TransformersSampler, "open", opened)

    async def ask() -> None:
        local = await open_local(team_export)
        try:
            planner, solver = local.engines
            other = planner.engine()
            prompt = local.chats["solver"].render(ASKED, None)
            params = SamplingParams(temperature=0, max_tokens=4)

            async def answer() -> tuple[int, ...]:
                return (await local.sampler.sample(prompt, 1, params, local.served["solver"].policy))[0].token_ids

            before = await answer()
            solver.engine()._host._process.kill()  # type: ignore[attr-defined]
            assert await answer() == before  # with the trained weights, which the next engine got
            assert (planner.restarts, solver.restarts) == (0, 1) and planner.engine() is other
        finally:
            await local.aclose()

    asyncio.run(ask())
    assert f"{short_base}: The sampler's engine is gone" in caplog.text
    assert f"The engine of {short_base} is back." in caplog.text


@pytest.mark.slow
def test_a_deployed_application_is_answered_by_both(team_export: Path, base: Path, short_base: Path) -> None:
    import openai

    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    more: dict[str, Any] = {"extra_body": {"return_token_ids": True}}

    def ask(role: str) -> list[int]:
        with cotune.role(role):
            answer = client.chat.completions.create(model="any", messages=ASKED, temperature=0, max_tokens=4, **more)
        return answer.choices[0].token_ids  # type: ignore[attr-defined,no-any-return]

    with cotune.deployed(team_export) as deployment:
        for role, own in (("planner", base), ("solver", short_base)):
            assert ask(role) == greedy(own, team_export / role, 4)
    assert deployment.calls == {("planner", "ok"): 1, ("solver", "ok"): 1}
