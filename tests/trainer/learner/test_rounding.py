"""Full fine-tuning where rounding swallows steps: at a small learning rate, beside large weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.tiny_app import application, build_base, converse, letters


def test_a_run_goes_on_where_rounding_swallows_steps_and_says_which(trainer, tmp_path):
    trainer.base = build_base(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(trainer.base)
    with torch.no_grad():
        model.model.norm.weight.fill_(40.0)
        model.get_input_embeddings().weight.div_(40.0)
    model.save_pretrained(trainer.base)
    summary = trainer(
        application(converse, first=letters),
        policy=[{"name": "all", "roles": ["first", "second"], "kind": "full"}],
        learner={"lr": 1e-6 / 21, "dtype": "bfloat16"},
    )
    assert summary.finished
    first, second = [line["policies"]["all"] for line in trainer.metrics()]
    assert first["lr"] == pytest.approx(1e-6 / 21)
    assert first["lost_tensors"] >= second["lost_tensors"] >= 1
    assert 0.0 < first["lost_share"] < 0.2
    assert first["lost_share_bfloat16"] > 0.9
    note = next(n for n in trainer.metrics()[0]["notes"] if "float32 rounds the whole step away" in n)
    assert "model.norm.weight 0.025" in note  # 1e-6 / 21 / 2 ** -19
    assert any("bfloat16 does not see a single step" in n for n in trainer.metrics()[0]["notes"])
    assert " ".join(note.split()[:8]) in " ".join(trainer.said.split())
    assert not any("model.norm.weight" in n for n in trainer.metrics()[1]["notes"])  # told once
