"""Which policy answers the model name that an application asks for, and when the server refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotune.adapters.export import Origin, TrainedPolicy, write_export
from cotune.adapters.fingerprint import BaseFingerprint
from cotune.adapters.manifest import FORMAT, Base, ExportedPolicy, ExportedRole, Manifest, read_manifest
from cotune.adapters.open_policies import LocalPolicies, served_base, served_policy
from cotune.adapters.serving import Answers, Endpoint, serve, serving, serving_local
from cotune.errors import ConfigError, CotuneError
from cotune.prompts.edits import Prompts
from cotune.records.structs import PolicyRef
from tests.adapters.test_serve import HELLO, Bytes, Scripted

BASE = Base(
    model="/models/tiny", sha256=BaseFingerprint(weights="b" * 64, config="c", tokenizer="d", chat_template="e")
)
NAME = "gpt-4o-mini"


def manifest(players: Mapping[str, str], models: Mapping[str, Any], others: bool = True) -> Manifest:
    """An export of version 8 in which `players` maps roles to policies, and `models` roles to the names they asked."""
    policies = [
        ExportedPolicy(name=name, kind="lora", version=8, base=BASE, fingerprint="f" * 64)
        for name in dict.fromkeys(players.values())
    ]
    return Manifest(
        format=FORMAT,
        cotune="0",
        created="",
        policies=tuple(policies),
        roles=tuple(ExportedRole(role=role, policy=policy) for role, policy in players.items()),
        other_roles="frozen" if others else "provider",
        other_base=BASE if others else None,
        models={role: tuple(asked) for role, asked in models.items()},
    )


@contextlib.contextmanager
def served(export: Manifest, **options: Any) -> Iterator[tuple[Endpoint, Scripted]]:
    sampler = Scripted()

    async def opened() -> LocalPolicies:
        roles = {entry.role: served_policy(entry.role, export.policy(entry.role)) for entry in export.roles}
        others = served_base(export.other_base) if export.other_base else None
        return LocalPolicies(sampler, Bytes(), roles, [], 64, others, manifest=export)

    with serving_local(opened, Answers(**options)) as endpoint:
        yield endpoint, sampler


def ask(endpoint: Endpoint, model: str) -> httpx.Response:
    return httpx.post(f"{endpoint.url}/chat/completions", json={"model": model, "messages": HELLO})


def answered(endpoint: Endpoint, model: str) -> str:
    """Who answered a request, or the text of the refusal."""
    answer = ask(endpoint, model)
    if answer.status_code == 404:
        return str(answer.json()["error"]["message"])
    assert answer.json()["model"] == model  # as it was asked
    return answer.headers["x-cotune-policy"]


def test_the_only_policy_answers_every_name_if_it_played_every_recorded_role() -> None:
    export = manifest({"planner": "shared", "writer": "shared"}, {"planner": [NAME], "writer": [NAME]})
    with served(export) as (endpoint, sampler):
        assert answered(endpoint, NAME) == answered(endpoint, "gpt-5") == answered(endpoint, "writer") == "shared@8"
    assert {policy for *_, policy in sampler.asked} == {PolicyRef("shared", 8)}
    assert endpoint.names.notes() == ["any other name: shared@8 (lora), /models/tiny"]


def test_a_role_that_training_left_out_ends_that() -> None:
    """The critic was answered by the untrained model in training, and its name still is."""
    with served(manifest({"writer": "writer"}, {"writer": [NAME], "critic": ["gpt-4o"]})) as (endpoint, _):
        assert answered(endpoint, NAME) == "writer@8"
        assert answered(endpoint, "gpt-4o") == answered(endpoint, "critic") == "base@0"
        assert "the models are: writer, critic, gpt-4o-mini, gpt-4o" in answered(endpoint, "gpt-5")


def test_an_export_whose_records_are_not_known_answers_no_other_name() -> None:
    with served(manifest({"writer": "writer"}, {})) as (endpoint, _):
        assert "--default POLICY (writer) or --default base" in answered(endpoint, NAME)


def test_a_name_that_one_role_asked_for_is_served_as_that_role() -> None:
    export = manifest({"planner": "planner", "writer": "writer"}, {"planner": ["big"], "writer": ["small", "tiny"]})
    with served(export) as (endpoint, _):
        names = {name: answered(endpoint, name) for name in ("big", "small", "tiny", "planner")}
        listed = httpx.get(f"{endpoint.url}/models").json()["data"]
    assert names == {"big": "planner@8", "small": "writer@8", "tiny": "writer@8", "planner": "planner@8"}
    assert {model["id"]: model["policy"] for model in listed} == {
        "planner": "planner", "writer": "writer", "big": "planner", "small": "writer", "tiny": "writer"
    }  # fmt: skip


def test_a_name_that_several_roles_share_is_refused() -> None:
    export = manifest({"planner": "planner", "writer": "writer"}, {"planner": [NAME], "writer": [NAME]})
    said = "planner and writer both ask for gpt-4o-mini: use cotune.deployed"
    with served(export) as (endpoint, sampler):
        assert answered(endpoint, NAME) == f"{said}, or start the server with --as gpt-4o-mini=ROLE."
        assert endpoint.names.notes()[0] == said
        assert not sampler.asked
    with served(export, aliases={NAME: "writer"}) as (endpoint, _):
        assert answered(endpoint, NAME) == "writer@8" and not endpoint.names.ambiguous
    with served(export, default="writer") as (endpoint, _):
        assert (answered(endpoint, NAME)[:18], answered(endpoint, "gpt-5")) == ("planner and writer", "writer@8")


def test_a_name_that_roles_of_one_policy_share_is_served_by_it() -> None:
    players = {"planner": "team", "writer": "team", "judge": "judge"}
    asked = {"planner": [NAME], "writer": [NAME], "judge": ["gpt-4o"]}
    with served(manifest(players, asked)) as (endpoint, _):
        assert answered(endpoint, NAME) == "team@8"


def test_any_other_name_is_answered_as_default_says() -> None:
    export = manifest({"planner": "planner", "writer": "writer"}, {"planner": ["big"], "writer": ["small"]})
    with served(export) as (endpoint, _):
        message = answered(endpoint, "gpt-5")
        assert "the models are: planner, writer, big, small." in message
        assert "--default POLICY (planner, writer) or --default base" in message
        assert httpx.get(f"{endpoint.url}/models/gpt-5").status_code == 404
    for default, policy in {"planner": "planner@8", "base": "base@0"}.items():
        with served(export, default=default) as (endpoint, _):
            assert (answered(endpoint, "gpt-5"), answered(endpoint, "small")) == (policy, "writer@8")
    with (
        pytest.raises(ConfigError, match=r"default = 'planer' is not a policy.*Did you mean planner\?"),
        served(export, default="planer"),
    ):
        pass


def test_edited_prompts_need_to_know_the_role() -> None:
    """One policy of two roles: which texts belong to a request for the shared name is not known."""
    export = manifest({"planner": "shared", "writer": "shared"}, {"planner": [NAME], "writer": [NAME]})
    with served(export, prompts=Prompts(parts=())) as (endpoint, _):
        assert "use cotune.deployed" in answered(endpoint, NAME)
        assert answered(endpoint, "writer") == "shared@8"


def test_a_plain_model_has_no_policies_to_choose_from(base: Path, in_thread: None) -> None:
    with pytest.raises(ConfigError, match=r"default = 'base' .* --role NAME"):
        serve(base, default="base", say=lambda line: None)


def test_a_policy_name_outside_ascii_is_escaped_in_the_header() -> None:
    with served(manifest({"prüfer": "prüfer"}, {"prüfer": [NAME]})) as (endpoint, _):
        assert answered(endpoint, NAME) == "pr%C3%BCfer@8"


def test_an_export_says_who_answers(in_thread: None, policies: list[TrainedPolicy], tmp_path: Path) -> None:
    """Through the public path: written, opened with its engine, and asked."""
    write_export(tmp_path / "out", policies[:1], origin=Origin(models={"planner": (NAME,), "critic": ("gpt-4o",)}))
    assert read_manifest(tmp_path / "out").models == {"planner": (NAME,), "critic": ("gpt-4o",)}
    with serving(tmp_path / "out") as endpoint:
        assert answered(endpoint, NAME) == "planner@3"
        assert "There is no model 'gpt-4o' here" in answered(endpoint, "gpt-4o")
    with serving(tmp_path / "out", default="base") as endpoint:
        assert answered(endpoint, "gpt-4o") == "base@0"


def test_base_must_be_one_model(policies: list[TrainedPolicy], other_base: Path, tmp_path: Path) -> None:
    other = replace(policies[1], kind="frozen", model=str(other_base), weights=None, lora=None)
    write_export(tmp_path / "out", [policies[0], other])
    with (
        pytest.raises(CotuneError, match="the policies have different base models"),
        serving(tmp_path / "out", default="base"),
    ):
        pass
