"""Edited prompts beside weights: exported, deployed and served, and no others than the weights were trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

import cotune
from cotune.adapters.export import Origin, TrainedPolicy, write_export
from cotune.adapters.manifest import read_manifest
from cotune.adapters.prompts import prompts_for
from cotune.adapters.serving import Answers
from cotune.errors import AdapterError, ConfigError
from cotune.prompts.edits import AS_WRITTEN
from cotune.prompts.file import write_prompts
from tests.adapters.test_serve import scripted
from tests.integrations.edits import NEW, OLD, part, prompts
from tests.integrations.provider import serving

OTHERS = prompts(part(OLD, "Something else."))
ASKED = [{"role": "system", "content": OLD}, {"role": "user", "content": "hello"}]


@pytest.fixture
def export(tmp_path: Path) -> Path:
    policy = TrainedPolicy(name="p", kind="provider", version=0, roles=("app",), model=None)
    write_export(tmp_path / "export", [policy], prompts=prompts())
    return tmp_path / "export"


def test_an_export_names_its_prompts_and_says_so(export: Path) -> None:
    assert read_manifest(export).prompts == prompts().id
    assert prompts().id[:12] in (export / "README.md").read_text()
    assert prompts_for(export) == prompts()


def test_weights_get_no_other_prompts_unless_told(export: Path) -> None:
    with pytest.raises(AdapterError, match=f"{prompts().id[:12]}.*{OTHERS.id[:12]}.*any_prompts"):
        prompts_for(export, OTHERS)
    assert prompts_for(export, OTHERS, any_prompts=True) == OTHERS
    found_for_it = msgspec.structs.replace(OTHERS, trained_with=prompts().id)
    assert prompts_for(export, found_for_it) == found_for_it
    write_prompts(export, OTHERS)
    with pytest.raises(AdapterError, match=r"prompts\.json holds .*roles\.json names"):
        prompts_for(export)


def test_weights_of_the_applications_own_prompts_get_edited_ones_only_if_found_for_them(tmp_path: Path) -> None:
    policy = TrainedPolicy(name="p", kind="provider", version=0, roles=("app",), model=None)
    write_export(tmp_path / "plain", [policy])
    with pytest.raises(AdapterError, match=r"the application's own prompts, and is given.*improve --run.*any_prompts"):
        prompts_for(tmp_path / "plain", OTHERS)
    found_for_it = msgspec.structs.replace(OTHERS, trained_with=AS_WRITTEN)
    assert prompts_for(tmp_path / "plain", found_for_it) == found_for_it
    # An export with prompts that were found later says what the weights were trained with, and takes either.
    write_export(tmp_path / "both", [policy], prompts=found_for_it, origin=Origin(trained_with=AS_WRITTEN))
    assert prompts_for(tmp_path / "both") == found_for_it
    assert "trained with the application's own prompts" in (tmp_path / "both" / "README.md").read_text()
    with pytest.raises(AdapterError, match="any_prompts"):
        prompts_for(tmp_path / "both", prompts())
    write_export(tmp_path / "later", [policy], prompts=OTHERS, origin=Origin(trained_with=prompts().id))
    assert prompts_for(tmp_path / "later", prompts()) == prompts()
    assert f"trained with prompts {prompts().id[:12]}" in (tmp_path / "later" / "README.md").read_text()


def test_the_provider_answers_with_edited_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_prompts(tmp_path / "prompts.json", prompts())
    with serving() as provider:
        client = openai.OpenAI(base_url=provider.url, api_key="k", max_retries=0)
        with cotune.deployed(prompts=file) as deployment:
            for asked in (ASKED, ASKED[1:]):
                client.chat.completions.create(model="m", messages=asked)
        client.chat.completions.create(model="m", messages=ASKED)
    assert [request["messages"] for request in provider.requests] == [
        [{"role": "system", "content": NEW}, ASKED[1]],
        ASKED[1:],
        ASKED,
    ]
    assert deployment.unedited == {("app", "prompt_unmatched"): 1}
    assert deployment.calls == {("app", "ok"): 2}
    assert (deployment.unlisted, deployment.passed_through) == ({}, {"app": 2})
    with pytest.raises(ConfigError, match="source"):
        cotune.deployed()


def test_a_served_policy_reads_the_edited_prompt() -> None:
    given = prompts(part("Old.", "New.", role="planner"))
    with scripted(Answers(prompts=given, aliases={"gpt-4o-mini": "planner"})) as (endpoint, sampler):
        client = openai.OpenAI(base_url=endpoint.url, api_key="k", max_retries=0)
        for role, first in (("planner", "Old."), ("writer", "Old."), ("planner", "Other."), ("gpt-4o-mini", "Old.")):
            messages: list[Any] = [{"role": "system", "content": first}, ASKED[1]]
            client.chat.completions.create(model=role, messages=messages, max_tokens=8)
        health = httpx.get(endpoint.url.removesuffix("/v1") + "/health").json()
    assert [bytes(asked[0]).decode() for asked in sampler.asked] == [
        "New.hello",
        "Old.hello",
        "Other.hello",
        "New.hello",
    ]
    assert health["unedited"] == {"prompt_unmatched": 1}
