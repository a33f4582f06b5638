"""Loading an export: whatever does not fit is refused with the field, the value and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.export import TrainedPolicy, write_export
from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.load import load_export
from cotune.errors import AdapterError
from cotune.integrations.models.folder.folder import read_parameters
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import fingerprint


@pytest.fixture
def copy(export: Path, tmp_path: Path) -> Path:
    return shutil.copytree(export, tmp_path / "copy")


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads((folder / "roles.json").read_text())
    change(manifest)
    (folder / "roles.json").write_text(json.dumps(manifest))


def test_a_good_export_loads_with_the_trained_weights(export: Path, base: Path, policies: list[TrainedPolicy]) -> None:
    loaded = load_export(export)
    assert loaded.roles == {"planner": PolicyRef("planner", 3), "writer": PolicyRef("writer", 3)}
    assert [engine.folder for engine in loaded.engines] == [base]
    for policy, trained in zip(loaded.manifest.policies, policies, strict=True):
        assert fingerprint(loaded.weights(policy)) == fingerprint(trained.weights)


def test_tampered_weights(copy: Path) -> None:
    file = copy / "writer" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(AdapterError, match=r"Policy 'writer'.*SHA-256 \w{64}, roles.json says \w{64}.*export the run"):
        load_export(copy)


@pytest.fixture(scope="module")
def full(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a policy with all weights."""
    policy = TrainedPolicy(
        name="all", kind="full", version=1, roles=["planner"], model=str(base), weights=read_parameters(base)
    )
    folder = tmp_path_factory.mktemp("full") / "export"
    write_export(folder, [policy])
    return folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_any_changed_file_of_a_full_export_is_refused(full: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(full, tmp_path / "export")
    load_export(copy)
    file = copy / "all" / name
    file.write_bytes(file.read_bytes().replace(b"e", b"i", 1))
    with pytest.raises(AdapterError, match=rf"Policy 'all'.*{name} has SHA-256 .*, roles.json says"):
        load_export(copy)


def test_a_file_that_was_added_is_refused_unless_nothing_reads_it(full: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(full, tmp_path / "export")
    (copy / "all" / "README.md").write_text("a model card")
    load_export(copy)
    (copy / "all" / "added_tokens.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"added_tokens.json is not in roles.json"):
        load_export(copy)


@pytest.mark.parametrize("kind", ["frozen", "provider"])
def test_only_trained_policies_name_a_folder(copy: Path, kind: str) -> None:
    edit(copy, lambda manifest: manifest["policies"][0].update(kind=kind, folder="/etc"))
    with pytest.raises(AdapterError, match=rf"'planner' is {kind} and names a folder, files or a fingerprint"):
        load_export(copy)


def test_links_that_lead_outside_are_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "writer").rename(tmp_path / "elsewhere")
    (copy / "writer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="leads outside the export"):
        load_export(copy)
    (copy / "writer").unlink()
    (copy / "writer").mkdir()
    for file in (tmp_path / "elsewhere").iterdir():
        (copy / "writer" / file.name).symlink_to(file)
    with pytest.raises(AdapterError, match="leads outside the export"):
        load_export(copy)


def test_weights_of_another_fingerprint(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["policies"][0].update(fingerprint="0" * 64))
    loaded = load_export(copy)
    with pytest.raises(AdapterError, match="fingerprint"):
        loaded.weights(loaded.manifest.policies[0])


def test_another_rank_than_that_of_the_weights_is_refused(copy: Path) -> None:
    """Its scale is alpha / rank: the adapter would give other answers."""
    edit(copy, lambda manifest: manifest["policies"][0]["lora"].update(rank=64))
    found = load_export(copy)
    with pytest.raises(AdapterError, match=r"the adapter has rank \d+, roles\.json says 64"):
        found.weights(found.manifest.policies[0])


def test_missing_weights(copy: Path) -> None:
    (copy / "planner" / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing"):
        load_export(copy)


def test_wrong_base(export: Path, other_base: Path) -> None:
    with pytest.raises(AdapterError, match=r"another base: weights of .* differ .*roles.json says \w{64}.*--model"):
        load_export(export, other_base)


def test_wrong_chat_template(export: Path, base: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(base, tmp_path / "base")
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(AdapterError, match="another base: chat_template of"):
        load_export(export, changed)


def test_base_that_is_gone(copy: Path) -> None:
    def lose(manifest: Any) -> None:
        for policy in manifest["policies"]:
            policy["base"]["model"] = "/nowhere/model"

    edit(copy, lose)
    with pytest.raises(AdapterError, match=r"/nowhere/model.*--model"):
        load_export(copy)


def test_a_moved_base_is_given_by_path(copy: Path, base: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(base, tmp_path / "elsewhere")
    assert [engine.folder for engine in load_export(copy, moved).engines] == [moved]


def test_missing_role(export: Path) -> None:
    with pytest.raises(AdapterError, match=r"no role 'judge'; it has: planner, writer"):
        load_export(export).manifest.policy("judge")


def test_duplicate_role(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["roles"][1].update(role="planner"))
    with pytest.raises(AdapterError, match="'planner' is there twice"):
        load_export(copy)


def test_role_of_an_unknown_policy(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["roles"][1].update(policy="ghost"))
    with pytest.raises(AdapterError, match="'writer' is played by 'ghost'; the policies are: planner, writer"):
        load_export(copy)


def test_two_policies_of_one_name(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["policies"][1].update(name="planner"))
    with pytest.raises(AdapterError, match="two are named 'planner'"):
        load_export(copy)


def test_no_roles(copy: Path) -> None:
    edit(copy, lambda manifest: manifest.update(roles=[]))
    with pytest.raises(AdapterError, match="roles is empty"):
        load_export(copy)


def test_folder_outside_the_export(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["policies"][0].update(folder="../planner"))
    with pytest.raises(AdapterError, match="outside the export"):
        load_export(copy)


def test_format_of_a_later_version(copy: Path) -> None:
    edit(copy, lambda manifest: manifest.update(format=2))
    with pytest.raises(AdapterError, match="format = 2, this cotune reads 1"):
        load_export(copy)


def test_field_of_a_wrong_type(copy: Path) -> None:
    edit(copy, lambda manifest: manifest["policies"][0].update(version="three"))
    with pytest.raises(AdapterError, match=r"Expected `int`, got `str` - at `\$.policies\[0\].version`"):
        load_export(copy)


def test_no_export_at_all(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="There is no folder"):
        load_export(tmp_path / "none")
    with pytest.raises(AdapterError, match=r"no export: there is no roles.json"):
        load_export(tmp_path)
    (tmp_path / "roles.json").write_text("{")
    with pytest.raises(AdapterError, match=r"roles.json is broken"):
        load_export(tmp_path)


def test_base_fingerprint_does_not_depend_on_shards(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = shutil.copytree(base, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert base_fingerprint(sharded) == base_fingerprint(base)


def test_weights_cut_short(base: Path, tmp_path: Path) -> None:
    cut = shutil.copytree(base, tmp_path / "cut")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="cut short"):
        base_fingerprint(cut)
