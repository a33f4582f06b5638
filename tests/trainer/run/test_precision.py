"""A run computes in bfloat16 where the processor has it, if sampler and learner agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cotune.config.train import TrainConfig
from cotune.errors import GapError
from cotune.integrations.models import bfloat16
from cotune.reading.facts import find_troubles
from cotune.reading.run import OpenedRun
from cotune.records.structs import PolicyRef
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.run_layout import Precision, read_run
from cotune.trainer import publish
from cotune.trainer.config.load import convert
from cotune.trainer.opening import open_run
from cotune.trainer.opening.restore import LOST_WEIGHTS_ERROR
from cotune.trainer.publish import sampled_gaps
from cotune.trainer.run import precision
from cotune.trainer.run.checkpoint import load_checkpoint
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask, letters

pytestmark = pytest.mark.skipif(not bfloat16.has_bfloat16(), reason="this processor does not multiply bfloat16")


AUTO = {"dtype": "auto"}


async def one_call(task):
    return (await ask("first", f"say {task['letter']}")).count(task["letter"]) / 4


def weights(run: Path) -> dict[str, np.ndarray]:
    found = load_checkpoint(run / "checkpoints")
    assert found is not None
    return load_file(found[1] / "0.safetensors")


def learned_in_bfloat16(trainer: Trainer, run: str = "run") -> list[bool]:
    """By step, whether the learner's passes were in bfloat16: the gap alone does not tell, as processors differ."""
    return ["lost_share_bfloat16" in line["policies"]["first"] for line in trainer.metrics(run)]


def test_in_bfloat16_where_both_agree_and_to_the_bit_when_resumed(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bfloat16, "LARGE", 1)
    app = application(one_call, first=letters)
    trainer(app, policies="lora", steps=2, to="whole", learner=AUTO)
    said = " ".join(trainer.said.split())
    assert "matrix products in bfloat16: sampler and learner differ by" in said
    assert learned_in_bfloat16(trainer, "whole") == [True, True]
    assert trainer.metrics("whole")[0]["policies"]["first"]["sampler_gap_mean"] < 0.05
    trainer(app, policies="lora", steps=1, to="parts", learner=AUTO)
    monkeypatch.setattr(bfloat16, "LARGE", 10**9)  # what this machine would choose is float32
    trainer.resume(app, to="parts", steps=2)
    assert "matrix products in bfloat16, as when the run began" in " ".join(trainer.said.split())
    expected = weights(trainer.folder / "whole")
    assert all(np.array_equal(array, expected[name]) for name, array in weights(trainer.folder / "parts").items())


def test_in_float32_where_the_gap_is_above_its_bound(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def far_apart(run: object) -> float:
        return 0.2

    monkeypatch.setattr(bfloat16, "LARGE", 1)
    monkeypatch.setattr(precision, "largest_gap", far_apart)
    app = application(one_call, first=letters)
    trainer(app, policies="lora", steps=1, probe_bound=0.1, learner=AUTO)
    said = " ".join(trainer.said.split())
    warning = "warning: the run computes in float32, because in bfloat16 sampler and learner differ by 0.2 nats a token"
    assert f"{warning} (probe_bound is" in said
    assert trainer.metrics()[0]["policies"]["first"]["sampler_gap_mean"] < 1e-5
    assert trainer.metrics()[0]["policies"]["first"]["probe_gap_mean"] < 1e-5
    with OpenedRun(trainer.folder / "run") as run:
        found = [(one.text, one.count) for one in find_troubles(run) if one.kind == "precision"]
    assert found == [("in float32, as sampler and learner differed in bfloat16 by 0.2 nats a token", 1)]
    trainer.resume(app, steps=2)  # the gap is not asked again
    assert "matrix products in float32, as when the run began" in " ".join(trainer.said.split())
    assert trainer.metrics()[1]["policies"]["first"]["sampler_gap_mean"] < 1e-5


def test_auto_is_float32_for_a_small_model_on_a_cpu(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = convert({"model": base, "learner": AUTO})
    monkeypatch.setattr(bfloat16, "LARGE", 10**9)
    assert precision.auto_dtype(config, "cpu", multiplies_bfloat16=True) == "float32"


GAP = 0.0625


def drifting(monkeypatch: pytest.MonkeyPatch, *, while_served: str) -> list[str]:
    """Sampler and learner come apart with the second version, while the model served is of this dtype. Returns the
    dtypes of the samplers that are opened."""

    async def gaps(sampler: Any, policy: PolicyRef, *rest: Any) -> np.ndarray:
        found = await sampled_gaps(sampler, policy, *rest)
        apart = policy.version == 2 and while_served == served[-1]
        return np.full_like(found, GAP) if apart else found

    served: list[str] = []
    opened = open_run._open_sampler

    async def opening(config: TrainConfig, stack: Any) -> Any:
        served.append(config.learner.dtype)
        return await opened(config, stack)

    monkeypatch.setattr(publish, "sampled_gaps", gaps)
    monkeypatch.setattr(open_run, "_open_sampler", opening)
    return served


def test_auto_goes_on_in_float32_where_both_come_apart_later(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "LARGE", 1)
    served = drifting(monkeypatch, while_served="bfloat16")
    app = application(one_call, first=letters)
    trainer(app, policies="lora", steps=3, learner=AUTO)
    said = " ".join(trainer.said.split())
    assert "differ by 0.0625 nats a token (at most 0.0625)" in said
    assert "Continuing in float32 from the last checkpoint." in said
    assert [line["step"] for line in trainer.metrics()] == [0, 1, 2]
    assert learned_in_bfloat16(trainer) == [True, False, False]
    assert served == ["bfloat16", "float32"]
    assert read_run(trainer.folder / "run").precision == Precision(dtype="float32", gap=GAP, fell_back=True)
    with OpenedRun(trainer.folder / "run") as run:
        assert [one.kind for one in find_troubles(run) if one.kind == "precision"] == ["precision"]


@pytest.mark.parametrize(
    ("dtype", "while_served", "remedy"),
    [
        ("bfloat16", "bfloat16", r'Set learner\.dtype = "float32"\.'),
        ("auto", "float32", "does not serve the weights that were sent"),
    ],
)
def test_a_gap_stops_a_run_in_the_precision_that_was_asked_for(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, dtype: str, while_served: str, remedy: str
) -> None:
    """And one that stays in float32, which is no matter of precision."""
    monkeypatch.setattr(bfloat16, "LARGE", 10**9)
    drifting(monkeypatch, while_served=while_served)
    app = application(one_call, first=letters)
    with pytest.raises(GapError, match=remedy) as raised:
        trainer(app, policies="lora", steps=3, learner={"dtype": dtype})
    assert raised.value.gap == pytest.approx(GAP)
    monkeypatch.undo()
    if dtype == "bfloat16":  # as its remedy says
        trainer.resume(app, **{"learner.dtype": "float32"})
        assert learned_in_bfloat16(trainer) == [True, False, False]


def test_after_the_change_to_float32_no_answers_of_lost_versions_are_trained_on(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back to its first step. Versions 1 and 2 are made again, in float32, with other weights."""
    monkeypatch.setattr(bfloat16, "LARGE", 1)
    drifting(monkeypatch, while_served="bfloat16")
    app = application(one_call, first=letters)
    trainer(app, policies="lora", steps=3, checkpoint_every=3, learner=AUTO)
    assert learned_in_bfloat16(trainer) == [False, False, False]
    gaps = [line["policies"]["first"]["sampler_gap_mean"] for line in trainer.metrics()]
    assert gaps[1] < 1e-5 and gaps[2] < 1e-5, "these answers are of the float32 versions"
    with open_store(trainer.folder / "run", read_only=True) as store:
        episodes = list(store.episodes(EpisodeFilters(phase="train", training_step=1)))
    assert [episode.status for episode in episodes].count("cancelled") == 3
    assert [episode.status for episode in episodes].count("ok") == 3
    assert {episode.error for episode in episodes} == {None, LOST_WEIGHTS_ERROR}
    assert "3 episodes are run again, as the weights that answered are lost" in " ".join(trainer.said.split())
