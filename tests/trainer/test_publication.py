"""What the proof of a publication costs: the beginnings of prompts, however long those are."""

from __future__ import annotations

from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.trainer.publish import PROBE
from tests.trainer.tiny_app import application, ask, letters


async def wordy(task):
    said = await ask("first", f"{'x' * 150} say {task['letter']}")
    return said.count(task["letter"]) / 4


def test_a_probe_samples_four_candidates_after_sixty_four_tokens(trainer, monkeypatch):
    asked, sample = [], TransformersSampler.sample

    async def listening(sampler, prompt, n, params, policy):
        if params == PROBE:
            asked.append((str(policy), len(prompt), n))
        return await sample(sampler, prompt, n, params, policy)

    monkeypatch.setattr(TransformersSampler, "sample", listening)
    trainer(application(wordy, first=letters), steps=1)
    assert asked == [("first@1", 64, 4)]
    (line,) = trainer.metrics()
    assert line["roles"]["first"]["prompt_tokens_mean"] > 150
    assert 0 < line["policies"]["first"]["probe_gap_mean"] < 1e-4
