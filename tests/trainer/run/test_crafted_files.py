"""Files that someone else made run no code, whatever loads them: checkpoint, export, model folder, tokenizer, chat
template, records."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.export import export_run
from cotune.adapters.fingerprint import hashes_of, write_hashes
from cotune.adapters.load import load_export
from cotune.algorithms.recipes import LossSpec
from cotune.cli.main import main
from cotune.errors import CotuneError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.folder.folder import TRUST, locate_model, read_parameters
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.conftest import Trainer
from tests.trainer.learner.forced import ForcedSettings
from tests.trainer.tiny_app import application, letters

BOTH = {"first": letters, "second": letters}
CODE = "import pathlib; pathlib.Path({!r}).write_text('ran')"


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, mark: Path) -> None:
        self.code = CODE.format(str(mark))

    def __reduce__(self) -> Any:
        return exec, (self.code,)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What crafted files write when their code runs."""
    return tmp_path / "ran"


@pytest.fixture
def evil(mark: Path) -> bytes:
    raw = pickle.dumps(Payload(mark))
    pickle.loads(raw)
    assert mark.read_text() == "ran"
    mark.unlink()
    return raw


@pytest.fixture(scope="module")
def trained(module_trainer: Trainer) -> Path:
    module_trainer(application(**BOTH), steps=2, policies="lora", to="trained")
    return module_trainer.folder / "trained"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def newest(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def test_every_file_of_a_checkpoint(trainer: Trainer, run: Path, evil: bytes, mark: Path) -> None:
    step = newest(run)
    names = [path.name for path in step.iterdir() if path.name != "hashes.json"]
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}
    for name in names:
        whole = (step / name).read_bytes()
        (step / name).write_bytes(evil)
        write_hashes(step)
        with pytest.raises(CotuneError):
            if name == "policies.json":
                export_run(run, run.parent / "export")
            trainer.resume(application(**BOTH), to="run")
        (step / name).write_bytes(whole)
    assert not mark.exists()


def test_the_metadata_of_a_distributed_checkpoint(trainer: Trainer, run: Path, evil: bytes, mark: Path) -> None:
    step = newest(run)
    parts = step / "0.optimizer"
    parts.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (parts / name).write_bytes(evil)
    for name in ("0.optimizer.pt", "0.rng.pt", "pytorch_model.bin"):
        (step / name).write_bytes(evil)
    write_hashes(step)
    with pytest.raises(CotuneError, match="holds no optimizer state of 'first'"):
        trainer.resume(application(**BOTH), to="run")
    assert not mark.exists()


def test_a_learner_alone(tiny_base: Path, tmp_path: Path, evil: bytes, mark: Path) -> None:
    policies = policies_for("shared", ["first"], LoraSpec(rank=4))
    learner = LocalLearner.open(str(tiny_base), policies, ForcedSettings(device="cpu"), LossSpec())
    learner.save(tmp_path)
    for file in [path for path in tmp_path.iterdir() if path.suffix in (".json", ".safetensors")]:
        whole = file.read_bytes()
        file.write_bytes(evil)
        with pytest.raises(CotuneError, match="Cannot restore the learner"):
            learner.load(tmp_path)
        file.write_bytes(whole)
    learner.load(tmp_path)
    assert not mark.exists()


def test_every_file_of_an_export(run: Path, tmp_path: Path, evil: bytes, mark: Path) -> None:
    export_run(run, tmp_path / "export")
    loaded = load_export(tmp_path / "export")
    folder = tmp_path / "export" / str(loaded.manifest.policies[0].folder)
    manifest = tmp_path / "export" / "roles.json"
    for name in ("adapter_model.safetensors", "adapter_model.bin"):
        (folder / name).write_bytes(evil)
        told = json.loads(manifest.read_text())
        told["policies"][0]["files"] = hashes_of(folder)
        manifest.write_text(json.dumps(told))
        with pytest.raises(CotuneError):
            crafted = load_export(tmp_path / "export")
            crafted.weights(crafted.manifest.policies[0])
    manifest.write_bytes(evil)
    with pytest.raises(CotuneError, match="is broken"):
        load_export(tmp_path / "export")
    assert not mark.exists()


@pytest.fixture
def model(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "model"))


def opens(model: Path) -> None:
    """Every way in which a model folder is read."""
    folder = str(locate_model(model))
    ChatTemplate.load(folder)
    read_parameters(Path(folder))
    open_policy_models(folder, policies_for("full", ["a"], LoraSpec()), ForcedSettings(device="cpu"), reference=())


def test_a_model_folder(model: Path, evil: bytes, mark: Path) -> None:
    opens(model)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        whole = (model / name).read_bytes()
        (model / name).write_bytes(evil)
        with pytest.raises(CotuneError):
            opens(model)
        (model / name).write_bytes(whole)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(evil)
    with pytest.raises(CotuneError, match=r"pytorch_model.bin is a pickle, which may run code"):
        opens(model)
    assert not mark.exists()


def own_code(model: Path, mark: Path, what: str) -> None:
    """Let a model bring its own code, as its config or its tokenizer's names it."""
    (model / "own.py").write_text(CODE.format(str(mark)) + "\nclass Own: ...\n")
    file = model / ("config.json" if what == "model" else "tokenizer_config.json")
    told = json.loads(file.read_text())
    if what == "model":
        told |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    else:
        told |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    file.write_text(json.dumps(told))


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_code_of_its_own_is_refused_and_nobody_is_asked(
    model: Path, mark: Path, capsys, monkeypatch, what: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda asked: pytest.fail(f"asked on the terminal: {asked}"))
    own_code(model, mark, what)
    assert main(["serve", str(model), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "auto_map" in said and said.count("\n") == 1, said
    assert "set COTUNE_TRUST_REMOTE_CODE=1" in said
    with contextlib.suppress(CotuneError):
        ChatTemplate.load(model)  # by whatever way a folder comes in
    assert not mark.exists()


def test_code_of_its_own_runs_where_the_environment_says_so(
    model: Path, mark: Path, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(TRUST, "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own_code(model, mark, "model")
    with pytest.raises(Exception, match="Own"):  # it is no real model
        opens(model)
    assert mark.read_text() == "ran"


def test_a_chat_template_sees_no_python(model: Path, mark: Path) -> None:
    reach = "cycler.__init__.__globals__.os.system('touch " + str(mark) + "')"
    for template in ("{{ " + reach + " }}", "{{ ().__class__.__base__.__subclasses__() }}"):
        (model / "chat_template.jinja").write_text(template)
        with pytest.raises(CotuneError):
            ChatTemplate.load(model).render([{"role": "user", "content": "x"}], None)
    assert not mark.exists()


def test_records(tmp_path: Path, evil: bytes, mark: Path, capsys) -> None:
    (tmp_path / "records.db").write_bytes(evil)
    for words in (
        ["show"],
        ["records", "sft", "--out", str(tmp_path / "sft")],
        ["otel", "export", "--out", str(tmp_path / "spans")],
    ):
        command = words[:2] if words[0] in ("otel", "records") else words[:1]
        assert main([*command, str(tmp_path), *words[len(command) :]]) == 1
        assert "cannot be used: file is not a database" in capsys.readouterr().err
    assert not mark.exists()
