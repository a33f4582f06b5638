"""The seconds of a step, beforehand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cotune.config.train import TrainConfig
from cotune.trainer.before.doctor import step_time
from cotune.trainer.before.doctor.doctor import judge_forecast
from cotune.trainer.before.doctor.machine import Gpu, Machine, gpu_of
from cotune.trainer.before.doctor.memory import Workload, forecast_processes
from cotune.trainer.before.doctor.model_size import ModelSize
from cotune.trainer.before.doctor.step_time import (
    NoEstimateError,
    Rates,
    StepTime,
    count_calls,
    duration_text,
    estimate_step,
    measure_cpu,
)
from cotune.trainer.config.load import convert
from tests.trainer.before.doctor.test_doctor import MACHINE

SIZE = ModelSize(
    parameters=11 * 10**8,
    head=10**8,
    tied=True,
    adapter=10**7,
    vocabulary=10**5,
    layers=20,
    cache_values=10**4,
    attention_width=10**4,
    token_bytes=2e6,
    pass_bytes=0.0,
    checkpointed_bytes=1e5,
)
LOAD = Workload(row=1000, sequences=128, candidates=4, policies=1)
H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_gb=80.0, free_gb=79.0)
CPU = Rates(operations=1e11, bandwidth=1e10, source="set by the test")


def asked(**changes: Any) -> TrainConfig:
    learner = {"dtype": "bfloat16", **changes.pop("learner", {})}
    sampling = {"max_tokens": 200}
    return convert({"model": "m", "engine": "transformers", "learner": learner, "sampling": sampling, **changes})


def estimate(config: TrainConfig, machine: Machine, *, calls: int = 0, size: ModelSize = SIZE) -> StepTime:
    bases = {"m": (size, LOAD)}
    return estimate_step(config, machine, bases, forecast_processes(bases, config, machine), calls=calls)


def on_gpu(gpu: Gpu = H100) -> Machine:
    return msgspec.structs.replace(MACHINE, gpus=(gpu,))


def test_a_step_on_a_gpu_in_numbers() -> None:
    step = estimate(asked(), on_gpu(), calls=2)
    # 0.4 * 989e12 operations and 0.7 * 3350e9 bytes a second. 128 answers of 200 tokens to 32 prompts of 800 tokens.
    # A decode step reads 2.2e9 bytes of weights and 128 * 900 * 1e4 * 2 of the cache, in 1.9 ms: launching the
    # kernels of 20 layers takes 18 ms. Prompts: 32 * 800 * (2 * 1e9 + 2 * 1e4 * 800) operations.
    assert step.parts["rollouts"] == pytest.approx(2 * (200 * 18e-3 + 5.161e13 / 3.956e14), rel=1e-3)
    # 51,200 tokens of 4 * 1e9 (layers), 12 * 1e4 * 1000 (attention), 6e7 (adapter); 25,600 of 4 * 1e8 (logits)
    assert step.parts["updates"] == pytest.approx(2 * (51_200 * 4.18e9 + 25_600 * 4e8) / 3.956e14, rel=1e-3)
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert step.basis.startswith(
        "32 tasks a step, 2 calls a task, prompts of 800 tokens, 4 answers of 200 tokens; 40% "
    )
    assert "not measured" in step.basis and "NVIDIA H100 80GB HBM3" in step.basis


def test_what_costs_more_takes_longer() -> None:
    plain = estimate(asked(), on_gpu())
    # TF32 has half of the rate of bfloat16.
    slow = estimate(asked(learner={"dtype": "float32"}), on_gpu()).parts["updates"]
    assert slow == pytest.approx(2 * plain.parts["updates"])
    apart = estimate(asked(), on_gpu(), size=msgspec.structs.replace(SIZE, shares_prompts=False))
    assert apart.parts["updates"] > 2 * plain.parts["updates"]  # 128 rows of 1,000 tokens, not 51,200 in all
    assert estimate(asked(plan={"kind": "independent"}), on_gpu()).parts["updates"] == apart.parts["updates"]
    assert estimate(asked(engine="vllm"), on_gpu()).parts["rollouts"] < plain.parts["rollouts"]
    # All weights: 6 operations for a parameter of a layer, 8 for one of the output embedding.
    full = msgspec.structs.replace(SIZE, adapter=0)
    found = estimate(asked(policies="full"), on_gpu(), size=full).parts["updates"]
    assert found == pytest.approx((51_200 * 6.12e9 + 25_600 * 8e8) / 3.956e14, rel=1e-3)


def test_a_step_on_a_cpu_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "measure_cpu", lambda dtype, threads: CPU)
    machine = msgspec.structs.replace(MACHINE, gpus=())
    step = estimate(asked(learner={"dtype": "float32"}), machine)
    # A decode step reads 4.4e9 bytes and 128 * 900 * 4e4 of the cache, in 0.9 s, and computes 128 * 2.2e9, in 2.8 s.
    assert step.parts["rollouts"] == pytest.approx(200 * 2.816 + 516.1, rel=1e-3)
    assert "set by the test" in step.basis


def test_the_rates_of_this_cpu_are_measured() -> None:
    rates = measure_cpu("float32", 1)
    assert rates.operations > 1e8 and rates.bandwidth > 1e7
    assert "measured on this CPU just now with 1 thread" in rates.source


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": "sft", "records": {"path": "run"}}, "trains on records"),
        ({"plan": {"kind": "replay"}}, "calls plan replay forks"),
        ({"engine": "http://127.0.0.1:8000"}, "engine 'http://127.0.0.1:8000'"),
        ({"engine": "vllm", "cluster": {"address": "10.0.0.1:6379"}}, "GPUs of a cluster"),
    ],
)
def test_a_run_whose_work_is_not_known_has_no_estimate(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoEstimateError, match=reason):
        estimate_step(asked(**changes), on_gpu(), {"m": (SIZE, LOAD)}, ())


def test_a_gpu_of_an_unknown_name_has_no_estimate(tiny_base: Any) -> None:
    config = convert({"model": str(tiny_base), "engine": "transformers"})
    unknown = Gpu(name="GeForce GT 210", memory_gb=24.0, free_gb=23.0)
    for gpu, reason in (
        (gpu_of(24), "rates of a GPU of 24 GB are not known. Run cotune doctor on the machine with the GPU"),
        (unknown, "rates of GeForce GT 210 are not known"),
    ):
        forecast, findings = judge_forecast(config, on_gpu(gpu), 100)
        assert forecast.memory and forecast.step is None
        assert [(one.about, one.level) for one in findings] == [("memory", "ok"), ("time", "ok")]
        assert reason in findings[1].text


def test_the_doctor_says_that_seconds_are_estimated_and_from_what(tiny_base: Any) -> None:
    config = convert({"model": str(tiny_base), "engine": "transformers", "roles": ["a", "b"], "steps": 3})
    forecast, findings = judge_forecast(config, on_gpu(), 100)
    assert forecast.step is not None
    seconds = forecast.step.seconds
    assert findings[1].text.startswith(
        f"estimated: {duration_text(seconds)} for a step, {duration_text(3 * seconds)} for the 3 "
    )
    assert "2 calls a task" in findings[1].text and "not measured" in findings[1].text
    _, findings = judge_forecast(config, on_gpu(), 100, calls=5)
    assert "5 calls a task" in findings[1].text


def test_an_episode_has_a_call_for_each_role_that_is_named() -> None:
    assert count_calls(asked()) == 1
    assert count_calls(asked(roles=["a", "b"])) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.31, "0.31 s"), (41.2, "41 s"), (89.0, "89 s"), (300.0, "5 min"), (17_000.0, "4.7 h"), (1e6, "12 days")],
)
def test_durations_are_said_with_two_digits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
