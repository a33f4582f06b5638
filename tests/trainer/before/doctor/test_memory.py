"""What a run will take of memory, beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from benchmarks.forecast import compare, shape
from cotune.algorithms.recipes import LossSpec
from cotune.cli.main import main
from cotune.config.cluster import DividedCluster
from cotune.config.train import TrainConfig
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.before.doctor.doctor import judge_forecast
from cotune.trainer.before.doctor.machine import Gpu
from cotune.trainer.before.doctor.memory import (
    Workload,
    forecast_processes,
    learner_memory,
    pass_tokens,
    peak_of_device,
    plan_memory,
    remedies,
    sampler_memory,
    shortages,
)
from cotune.trainer.before.doctor.model_size import ModelSize, empty_policy, measure, measure_folder
from cotune.trainer.config.load import convert
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory.pass_size import kept_bytes
from tests.integrations.seeing_models import build_seeing
from tests.trainer.before.doctor.test_doctor import MACHINE
from tests.trainer.learner.forced import ForcedSettings

BILLION = ModelSize(
    parameters=10**9,
    adapter=10**7,
    vocabulary=10**5,
    layers=20,
    cache_values=10**4,
    token_bytes=2e6,
    pass_bytes=0.0,
    checkpointed_bytes=1e5,
)
LOAD = Workload(row=1000, sequences=64, policies=2)


def asked(**changes: Any) -> TrainConfig:
    return convert({"model": "m", "policies": "lora", **changes})


def forced(config: TrainConfig, **settings: Any) -> TrainConfig:
    """With settings of the learner that a configuration may not hold."""
    return msgspec.structs.replace(config, learner=ForcedSettings(**settings))


def parts(process: Any) -> dict[str, float]:
    return {name: round(size / 1e9, 3) for name, size in process.parts.items()}


def test_a_pass_takes_no_more_than_is_left_where_memory_is_short() -> None:
    """A sixteenth of the machine is 16 GB; of the 5.5 GB that are free the learner itself leaves 0.5."""
    plan = learner_memory(BILLION, asked(), LOAD, device="cpu", free=5.5e9, total=256e9)
    assert plan.pass_tokens == 1778 and plan.bytes < plan.free


def test_a_learner_of_two_adapters_in_numbers() -> None:
    plan = learner_memory(BILLION, asked(), LOAD, device="cpu", free=20e9, total=32e9)
    # 32 GB / 16 for activations: 2e9 / (1.25 * (2e6 + 2e6 / 20)) = 762 tokens, fewer than a row: checkpointed passes of
    # at most 2e9 / (1.25 * (1e5 + 1.4 * 2e6 / 20)) = 6666 tokens: 64,000 in 10, each of 1.05 * (1e5 + 1.4e5) bytes.
    assert parts(plan) == {
        "python and libraries": 0.6,
        "weights": 4.08,  # fp32: the base once, and two adapters
        "gradients and optimizer": 0.2,  # 1e7 * 4 of one policy at a time, and 2 * 1e7 * 8
        "a pass of 6400 tokens, checkpointed": 1.613,  # its logits are gone by then
        "pages kept during an update": 6.4,  # half of what 6,400 tokens of a plain pass keep: 2e6 each
    }


def test_two_bases_are_counted_once_each() -> None:
    machine = msgspec.structs.replace(MACHINE, gpus=(), memory_gb=32.0, free_memory_gb=20.0)
    large = msgspec.structs.replace(BILLION, parameters=2 * 10**9, token_bytes=3e6, checkpointed_bytes=2e5)
    frozen = msgspec.structs.replace(LOAD, policies=0)
    learner, *samplers = forecast_processes(
        {"a": (BILLION, LOAD), "b": (large, LOAD), "c": (large, frozen)}, asked(), machine
    )
    # c, which no policy trains, is not in the learner. The passes of b, of 4000 tokens as
    # 2 GiB / (1.25 * (2e5 + 1.4 * 3e6 / 20)) = 4190, take 4000 * 1.05 * (2e5 + 1.4 * 3e6 / 20) bytes: more than those
    # of a.
    assert parts(learner) == {
        "python and libraries": 0.6,
        "weights": 12.16,  # 4.08 and 8.08
        "gradients and optimizer": 0.4,
        "a pass of 4000 tokens, checkpointed": 1.722,
    }  # No pages are kept: their gaps would take 6 GB more.
    assert [one.process for one in samplers] == ["sampler of a", "sampler of b", "sampler of c"]
    assert [parts(one)["weights"] for one in samplers] == [4.0, 8.0, 8.0]
    assert [parts(one)["published versions"] for one in samplers] == [0.2, 0.2, 0.0]


def test_a_learner_of_all_weights_in_numbers() -> None:
    size = msgspec.structs.replace(BILLION, adapter=0)
    config = forced(asked(policies="full"), micro_batch_tokens=2048)
    plan = learner_memory(size, config, LOAD, device="cpu", free=20e9, total=32e9)
    found = parts(plan)
    assert (found["weights"], found["gradients and optimizer"]) == (8.0, 20.0)
    assert found["a pass of 2000 tokens"] == 4.41  # 1.05 * 2000 * (2e6 + 2e6 / 20)
    eighth = asked(policies="full", learner={"optimizer": "adamw8bit"})
    plan = learner_memory(size, eighth, LOAD, device="H100", free=75e9, total=80e9)
    assert parts(plan)["gradients and optimizer"] == 8.0


def test_a_sampler_in_numbers() -> None:
    found = parts(sampler_memory(BILLION, asked(), LOAD, device="cpu", free=20e9, total=32e9))
    assert found == {
        "python and libraries": 0.5,
        "weights": 4.0,
        "published versions": 0.2,  # two adapters, and one that arrives, is read and copied
        "cache of 64 sequences": 2.801,  # 64 * (1000 + 64) * 1e4 * 4, and 64 * 1e5 logits of 12 bytes
        "earlier prompts, at most": 1.0,
    }
    repeatable = asked(sampling={"repeatable": True})
    found = parts(sampler_memory(BILLION, repeatable, LOAD, device="cpu", free=20e9, total=32e9))
    assert found["earlier prompts, at most"] == 0.0


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, (686, False)),  # 2e9 / (1.25 * 2.1e6) = 761, so at most 704 of 50 * 96, in even passes
        ({"micro_batch_tokens": 100}, (100, False)),
        ({"micro_batch_tokens": 5000}, (4800, False)),  # no more than a mini-batch has
        ({"mini_batch": 2}, (192, False)),
    ],
)
def test_passes_are_those_that_the_learner_will_make(learner: dict[str, Any], expected: tuple[int, bool]) -> None:
    short = msgspec.structs.replace(LOAD, row=96)
    assert (
        pass_tokens(BILLION.pass_memory("cpu"), forced(asked(), **{"mini_batch": 50, **learner}), short, 2e9, "cpu")
        == expected
    )


def test_passes_on_a_gpu_are_larger_than_on_a_cpu() -> None:
    found = {
        device: pass_tokens(BILLION.pass_memory("cpu"), asked(), LOAD, 1e12, device)
        for device in ("cpu", "a GPU of 80 GB")
    }
    # A mini-batch of 64 rows has 64,000 tokens, which are cut evenly.
    assert found == {"cpu": (8000, False), "a GPU of 80 GB": (64_000, False)}


@pytest.mark.parametrize("layout", ["lora", "full"])
def test_what_a_token_keeps_is_what_the_learner_measures(base: str, layout: Any) -> None:
    lora = LoraSpec(rank=4, alpha=8.0)
    settings = ForcedSettings(device="cpu", shared_prompts=False)
    model = LocalLearner.open(base, policies_for(layout, ["a"], lora), settings, LossSpec())._policies["a"]
    size = measure_folder(Path(base), lora if layout == "lora" else None, "float32")
    trained = sum(p.numel() for p in model.parameters().values())
    assert trained == (size.adapter or size.parameters)
    assert size.token_bytes == pytest.approx(kept_bytes(model, checkpointed=False).token, rel=0.1)
    assert size.checkpointed_bytes == pytest.approx(kept_bytes(model, checkpointed=True).token, rel=0.25)


def test_what_does_not_fit_blocks_and_says_what_to_change(tiny_base: Path) -> None:
    config = convert({"model": str(tiny_base), "policies": "full", "roles": ["a", "b"]})
    forecast, [finding, *_] = judge_forecast(config, msgspec.structs.replace(MACHINE, gpus=()), 512)
    assert (finding.level, [process.process for process in forecast.memory]) == ("ok", ["learner", "sampler"])
    small = msgspec.structs.replace(MACHINE, gpus=(), memory_gb=1.0, free_memory_gb=0.75)
    _, [finding, *_] = judge_forecast(config, small, 512)
    assert finding.level == "blocks"
    assert "this machine takes" in finding.text and "GB too much (2 policies, prompts of up to 512" in finding.text
    assert 'policies = "lora"' in finding.remedy and "ower concurrency" in finding.remedy


def test_pages_that_do_not_fit_are_not_kept_under_a_limit() -> None:
    plan = [learner_memory(BILLION, asked(), LOAD, device="cpu", free=16e9, total=32e9)]
    assert parts(plan[0])["pages kept during an update"] > 0 and "learner.memory" in remedies(plan, asked())
    limit = asked(learner={"memory": "12GiB"})
    plan = [learner_memory(BILLION, limit, LOAD, device="cpu", free=16e9, total=32e9)]
    assert "pages kept during an update" not in parts(plan[0]) and "learner.memory" not in remedies(plan, limit)


def test_a_gpu_that_is_too_small(tiny_base: Path) -> None:
    config = convert({"model": str(tiny_base), "learner": {"dtype": "float32"}})
    machine = msgspec.structs.replace(MACHINE, gpus=(Gpu(name="small", memory_gb=1.0, free_gb=0.6),))
    forecast, [finding, *_] = judge_forecast(config, machine, 512)
    assert {process.device for process in forecast.memory} == {"small"}
    assert finding.level == "blocks" and 'learner.dtype = "bfloat16"' in finding.remedy


def test_on_a_cluster_engine_and_learner_have_a_gpu_each() -> None:
    machine = msgspec.structs.replace(MACHINE, gpus=(Gpu(name="small", memory_gb=7.4, free_gb=7.4),))
    cluster = DividedCluster(address="local", engines=1, gpus_per_engine=1, learners=1, gpus_per_learner=1)
    alone = forecast_processes({"a": (BILLION, LOAD)}, asked(), machine)
    on_ray = msgspec.structs.replace(asked(), cluster=cluster)
    apart = forecast_processes({"a": (BILLION, LOAD)}, on_ray, machine)
    assert [process.device for process in apart] == ["small of a learner", "small of an engine"]
    assert sum(process.bytes for process in alone) > alone[0].free > max(process.bytes for process in alone)
    assert [text.split(" ")[0] for text in shortages(alone)] == ["small"]
    assert list(shortages(apart)) == []


def test_a_model_that_cannot_be_reckoned_says_so(tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **options: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr("cotune.trainer.before.doctor.memory.known_size", broken)
    forecast, [finding, *_] = judge_forecast(convert({"model": str(tiny_base)}), MACHINE, 512)
    assert forecast.memory == () and finding.level == "warns"
    assert "no forecast can be made (RuntimeError: no such operator)" in finding.text


def test_the_command_prints_the_table_of_a_run(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = msgspec.to_builtins(convert({"model": str(tiny_base), "roles": ["a", "b"], "concurrency": 4}))
    (tmp_path / "run.json").write_text(json.dumps({"model": str(tiny_base), "config": config}))
    assert main(["doctor", "--run", str(tmp_path), "--prompt-tokens", "100"]) == 0
    printed = capsys.readouterr().out
    for said in ("memory, estimated", "gradients and optimizer", "cache of 16 sequences", "published versions"):
        assert said in printed
    assert "(2 policies, prompts of up to 100 tokens)" in " ".join(printed.split())


@pytest.mark.parametrize("kind", ["llava", "idefics3"])
def test_passes_over_images_take_what_is_said_beforehand(kind: str) -> None:
    """Of 4 pictures: what the vision tower really holds at its peak."""
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    pixels = torch.rand(4, 3, 224, 224)
    given = {"pixel_values": pixels}
    if kind == "llava":
        sight = CLIPVisionConfig(**shape, image_size=224, patch_size=14)
        network = LlavaForConditionalGeneration(LlavaConfig(vision_config=sight, text_config=text, image_token_id=9))
    else:
        sizes = {**shape, "model_type": "idefics3_vision", "image_size": 224, "patch_size": 14}
        config = Idefics3Config(vision_config=sizes, text_config=text, scale_factor=2, image_token_id=9)
        network = Idefics3ForConditionalGeneration(config)
        given = {"pixel_values": pixels[None], "pixel_attention_mask": torch.ones(1, 4, 224, 224, dtype=torch.int64)}
    tracker = MemTracker()  # type: ignore[no-untyped-call]
    tracker.track_external(network)
    with torch.no_grad(), tracker:
        network.eval().base_model.get_image_features(**given)
    held = {str(kind): size for kind, size in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()}
    peak = held["Total"] - sum(p.nbytes for p in network.parameters()) + sum(t.nbytes for t in given.values())
    factor = measure(network.config, LoraSpec(), "float32").image_factor
    assert 0.7 * factor < peak / pixels.nbytes < 1.05 * factor


def test_the_memory_of_a_model_that_sees_counts_its_images(tmp_path: Path) -> None:
    build_seeing(tmp_path)
    config = convert({"model": str(tmp_path), "cluster": {"address": "local", "learners": 2}})
    forecast, [finding, *_] = judge_forecast(config, msgspec.structs.replace(MACHINE, gpus=()), 512)
    assert forecast.memory and finding.text.endswith("prompts of up to 512 tokens)")
    learner = parts(forecast.memory[0])
    assert learner["images as they were processed, at most"] == 0.268
    # 4 bytes of 4 + (2 * 32 + 3 * 64) / (3 * 8 * 8) for each of 2**23 values
    assert learner["passes over images, at most"] == 0.179
    assert "all weights, for a pass" in learner


def gpu(size: float) -> Any:
    return msgspec.structs.replace(MACHINE, gpus=(Gpu(name="a GPU", memory_gb=size, free_gb=size),))


def test_on_a_gpu_as_many_sequences_run_at_once_as_fit() -> None:
    config = asked(learner={"dtype": "bfloat16"})
    load = msgspec.structs.replace(LOAD, sequences=1024, candidates=4)
    _, roomy = forecast_processes({"a": (BILLION, load)}, config, gpu(80))
    _, tight = forecast_processes({"a": (BILLION, load)}, config, gpu(12))
    assert "cache of 1024 sequences" in roomy.parts
    # Of 12 GiB (12.88e9 bytes) the learner holds 2.78e9 (base 2e9, adapters and their state) and the sampler 3.04e9,
    # contexts included; 0.4 of the rest is for sequences of (1000 + 64) * 1e4 values of 2 bytes.
    [name] = [name for name in tight.parts if name.startswith("cache")]
    assert name == "cache of 132 sequences at once, of 1024"
    assert not list(shortages(forecast_processes({"a": (BILLION, load)}, config, gpu(12))))


def test_the_candidates_of_a_call_are_decoded_together_or_it_does_not_fit() -> None:
    load = msgspec.structs.replace(LOAD, row=100_000, sequences=256, candidates=8)
    plan = forecast_processes({"a": (BILLION, load)}, asked(learner={"dtype": "bfloat16"}), gpu(12))
    assert "cache of 8 sequences at once, of 256" in plan[1].parts
    assert [text.split(" ")[0] for text in shortages(plan)][-1] == "a"


def test_caches_and_passes_take_turns_on_a_gpu_in_mode_sync_only() -> None:
    plan = {
        mode: forecast_processes({"a": (BILLION, LOAD)}, asked(mode=mode, learner={"dtype": "bfloat16"}), gpu(24))
        for mode in ("sync", "async")
    }
    learner, sampler = plan["sync"]
    lasting = learner.bytes - learner.temporary + sampler.bytes - sampler.temporary
    assert peak_of_device(plan["sync"]) == pytest.approx(lasting + max(learner.temporary, sampler.temporary))
    assert peak_of_device(plan["async"]) == pytest.approx(sum(process.bytes for process in plan["async"]))
    assert plan["async"][0].pass_tokens <= learner.pass_tokens


def test_a_run_is_forecast_for_a_gpu_that_is_not_here(tiny_base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", str(tiny_base), "--gpu", "24"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "a GPU of 24 GB, 23.3 of 24.0 GB free" in printed and "on a GPU of 24 GB" in printed
    for wrong, said in (("0", "must be from 1 to 1024 GB"), ("nan", "must be from 1 to 1024 GB")):
        assert main(["doctor", "--model", str(tiny_base), "--gpu", wrong]) == 1
        assert said in capsys.readouterr().err
    assert main(["doctor", "--gpu", "24"]) == 1
    assert "--gpu needs one" in capsys.readouterr().err


@pytest.mark.long
def test_forecasts_are_within_15_percent_of_peaks_counted_in_the_code_of_a_gpu() -> None:
    """`benchmarks.forecast` with a small model: the same code as for its table."""
    rows = list(compare("tiny", "bfloat16", {False: 2048, True: 4096}))
    assert [(row["kind"], row["checkpointed"]) for row in rows] == [
        ("lora", False),
        ("lora", True),
        ("full", False),
        ("full", True),
    ]
    for row in rows:
        assert 0.85 <= row["ratio"] <= 1.15, row


@pytest.mark.parametrize("joined", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_model_without_storage_keeps_its_ties_and_counts_layers_that_it_leaves_out(joined: bool) -> None:
    config, lora = shape("tiny"), LoraSpec(rank=16)
    size = measure(config, lora, "bfloat16", joined=joined, device="cuda")
    whole = empty_policy(config, lora, "bfloat16", joined=joined, device="cuda", whole=True)
    assert (whole.parameters, whole.adapter) == (size.parameters, size.adapter)
    weights = {id(p): p.numel() for p in whole.policy.network.parameters()}
    assert sum(weights.values()) == size.parameters + size.adapter
    kept = whole.kept_bytes(checkpointed=False)
    assert kept.token == pytest.approx(size.token_bytes, rel=1e-3)
    assert kept.fixed == pytest.approx(size.pass_bytes, rel=1e-3)
    assert whole.kept_bytes(checkpointed=True).token == pytest.approx(size.checkpointed_bytes, rel=1e-3)


def test_adapters_on_a_gpu_are_counted_in_one_step_with_their_layers() -> None:
    config, lora = shape("tiny"), LoraSpec(rank=16)
    size = measure(config, lora, "bfloat16", joined=True, device="cuda")
    of_peft = measure(config, lora, "bfloat16", device="cuda")
    # A joined pass keeps one copy of each adapter in bfloat16, and PEFT's layers keep more of each token.
    assert size.pass_bytes == pytest.approx(2 * size.adapter, rel=1e-2)
    assert size.token_bytes < of_peft.token_bytes
    assert not size.rounded  # all frozen weights are bfloat16, embeddings too


@pytest.mark.parametrize(
    ("changes", "joined"),
    [
        ({}, True),
        ({"learner": {"quantize": "4bit"}}, False),
        ({"cluster": {"address": "local", "engines": 1, "gpus_per_engine": 0.5, "learners": 1}}, False),
    ],
)
def test_the_forecast_for_a_gpu_follows_the_learner_of_the_run(
    changes: dict[str, Any], joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[dict[str, Any]] = []

    def record(*_: Any, **how: Any) -> ModelSize:
        asked_for.append(how)
        return BILLION

    monkeypatch.setattr("cotune.trainer.before.doctor.memory.known_size", record)
    plan_memory(asked(**changes), gpu(80), {"m": Path("m")}, prompt=100)
    assert asked_for == [{"joined": joined, "device": "cuda"}]
