"""The parts of the measurement, the most decisive first. Each yields its figures one after the other."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.gpu.models import build, config_of, episode_rows, made_on_the_device, plain_rows
from benchmarks.gpu.tools import (
    LORA,
    Bench,
    Figures,
    free_memory,
    gap,
    near,
    open_engine,
    open_learner,
    peak_gb,
    same,
    seconds_of,
    wait,
)
from cotune.algorithms.samples import TrainRow
from cotune.integrations.versions import versions_of_installed
from cotune.trainer.before.doctor.memory import Workload, learner_memory
from cotune.trainer.before.doctor.model_size import measure
from cotune.trainer.config.load import convert
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.teacher import LocalTeacher
from tests.trainer.learner.forced import ForcedSettings

SMALL, MIDDLE, LARGE = "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"


def small(bench: Bench) -> str:
    """The model of the parts that measure no sizes."""
    return "tiny" if bench.tiny else SMALL


def models(bench: Bench) -> tuple[str, ...]:
    return ("tiny",) if bench.tiny else (SMALL, MIDDLE, LARGE)


def device(bench: Bench) -> Iterator[Figures]:
    """The name of the device, and the share of its peaks that is reached."""
    figures: Figures = {"python": platform.python_version(), "cores": os.cpu_count()}
    figures |= versions_of_installed(("torch", "transformers", "peft", "triton"))
    if bench.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        figures |= {
            "gpu": about.name,
            "capability": f"{about.major}.{about.minor}",
            "memory_gb": round(about.total_memory / 1e9, 1),
            "free_gb": round(torch.cuda.mem_get_info()[0] / 1e9, 1),
            "cuda": torch.version.cuda,
        }
    yield figures

    side = bench.size(8192, 256)
    left, right = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = seconds_of(bench, lambda: left @ right, rounds=bench.size(20, 2))
    yield {"bfloat16_tflops": round(2 * side**3 / seconds / 1e12, 3)}
    source = torch.zeros(bench.size(1 << 30, 1 << 20), device=bench.device)
    target = torch.empty_like(source)
    seconds = seconds_of(bench, lambda: target.copy_(source), rounds=bench.size(10, 2))
    yield {"copied_gb_per_second": round(2 * source.nbytes / seconds / 1e9, 1)}


def correctness(bench: Bench) -> Iterator[Figures]:
    """Whether small models compute correctly on the device. Each line has `ok`, the figure and its bound."""
    yield from gradients(bench)
    yield from agreement(bench)
    if bench.device == "cuda":
        yield from out_of_memory(bench)


def gradients(bench: Bench) -> Iterator[Figures]:
    """Updates on the device against the CPU, trees against rows, one attention against the other, and resuming."""
    rows = episode_rows(2, 2, 4, bench.size(96, 24), bench.size(64, 16), config_of("tiny").vocab_size)
    exact = bench._replace(device="cpu", dtype="float32")
    for kind in ("lora", "full"):
        reference = open_learner("tiny", exact, kind=kind)
        learner = open_learner("tiny", bench, kind=kind)
        learner.adopt("agent", reference.weights("agent"))
        expected = reference.update("agent", rows)["grad_norm"]
        norm = learner.update("agent", rows)["grad_norm"]
        yield near(f"gradient of {kind} against float32 on the CPU", norm, expected, bound=0.1)

    precise = bench._replace(dtype="float32")
    tree, apart = (open_learner("tiny", precise, shared_prompts=shared) for shared in (True, False))
    yield same("trees against rows", tree.logprobs("agent", rows), apart.logprobs("agent", rows), bound=1e-3)
    norms = [learner.update("agent", rows)["grad_norm"] for learner in (tree, apart)]
    yield near("gradient of trees against rows", *norms, bound=1e-3)

    if bench.device == "cuda":
        flex, blocks = (open_learner("tiny", bench, tree_attention=kind) for kind in ("flex", "blocks"))
        found, expected = (learner.logprobs("agent", rows) for learner in (flex, blocks))
        yield same("FlexAttention against SDPA", found, expected, bound=0.1)
        norms = [learner.update("agent", rows)["grad_norm"] for learner in (flex, blocks)]
        yield near("gradient by FlexAttention against SDPA", *norms)

    with tempfile.TemporaryDirectory() as folder:
        learner, resumed = open_learner("tiny", bench), open_learner("tiny", bench)
        learner.update("agent", rows)
        learner.save(Path(folder))
        resumed.load(Path(folder))
        yield same("resumed from a checkpoint", resumed.logprobs("agent", rows), learner.logprobs("agent", rows), 0.0)


def agreement(bench: Bench) -> Iterator[Figures]:
    """Log-probabilities of engine and learner, before an update and after its publication."""
    name = small(bench)
    prompts = [row.prompt_ids for row in plain_rows(8, bench.size(256, 16), 1, config_of(name).vocab_size)]
    tokens = bench.size(64, 8)
    learner, engine = open_learner(name, bench), open_engine(name, bench)
    try:
        yield gap(engine, learner, "engine against learner, untrained", prompts, tokens)
        learner.update("agent", engine.last)
        engine.publish(learner)
        yield gap(engine, learner, "engine against learner, published", prompts, tokens)
    finally:
        engine.close()


def out_of_memory(bench: Bench) -> Iterator[Figures]:
    """Take most of the GPU's memory away, so that the learner and the engine run out of it."""
    name = small(bench)
    learner = open_learner(name, bench, micro_batch_tokens=16_384)
    rows = plain_rows(8, 1984, 64, config_of(name).vocab_size)
    ballast = take_all_but(3 << 30)
    figures = learner.update("agent", rows)
    del ballast, learner
    free_memory(bench)
    halved, norm = figures["halved_passes"], figures["grad_norm"]
    yield {"check": "learner out of memory", "ok": bool(halved > 0 and np.isfinite(norm)), "halved_passes": halved}

    engine = open_engine(name, bench)
    try:
        ballast = take_all_but(2 << 30)
        answers = engine.draw([tuple(range(2, 1026))] * 128, n=8, tokens=64)
        del ballast
        yield {"check": "engine out of memory", "ok": all(len(one) == 8 for one in answers), "calls": len(answers)}
    finally:
        engine.close()
        free_memory(bench)


def take_all_but(size: int) -> torch.Tensor:
    """A tensor that leaves so many bytes of the GPU."""
    torch.cuda.empty_cache()
    return torch.empty(max(0, torch.cuda.mem_get_info()[0] - size), dtype=torch.uint8, device="cuda")


def updates(bench: Bench) -> Iterator[Figures]:
    """Rows that share nothing, a LoRA of rank 16: tokens a second by the size of passes; then one very long row."""
    row, long = bench.size(2048, 32), bench.size(65_536, 256)
    jobs = [(name, tokens) for tokens in ((16_384, 8192, 2048) if not bench.tiny else (64,)) for name in models(bench)]
    for name, tokens in [*jobs, *((name, long) for name in models(bench))]:
        if bench.time_is_up:
            yield {"left_out": f"{name}, passes of {tokens} tokens"}
            continue
        length = long if tokens == long else row
        rows = plain_rows(max(1, tokens // length), length - length // 4, length // 4, config_of(name).vocab_size)
        free_memory(bench)
        learner = open_learner(name, bench, micro_batch_tokens=tokens)
        figures = timed_update(bench, learner, rows)
        if bench.device == "cuda":
            figures["forecast_gb"] = round(forecast(name, bench.dtype, tokens, length) / 1e9, 2)
        yield {"model": name, "pass": tokens, "row": length, **figures}
        del learner


def trees(bench: Bench) -> Iterator[Figures]:
    """Episodes of four turns with four candidates each: distinct tokens a second, and those that the calls have."""
    prompt, answer = bench.size(1024, 24), bench.size(256, 8)
    for name in models(bench):
        if bench.time_is_up:
            yield {"left_out": name}
            continue
        free_memory(bench)
        learner = open_learner(name, bench)
        rows = episode_rows(bench.size(4, 1), 4, 4, prompt, answer, config_of(name).vocab_size)
        yield {"model": name, "turns": 4, "candidates": 4, **timed_update(bench, learner, rows)}
        del learner


def timed_update(bench: Bench, learner: LocalLearner, rows: Sequence[TrainRow]) -> Figures:
    """The second of two updates."""
    learner.update("agent", rows)
    wait(bench)
    began, host = time.perf_counter(), time.thread_time()
    figures = learner.update("agent", rows)
    host = time.thread_time() - host
    wait(bench)
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 4),
        "distinct_tokens_per_second": round(figures["computed_tokens"] / seconds),
        "call_tokens_per_second": round(figures["total_tokens"] / seconds),
        "host_share": round(host / seconds, 3),
        "mfu": round(figures["mfu"], 4) if "mfu" in figures else None,
        "pass_tokens": figures["pass_tokens"],
        "halved_passes": figures["halved_passes"],
        "checkpointed_steps": figures["checkpointed_steps"],
        "peak_gb": peak_gb(bench),
        "kernels": kernels(bench, learner, rows),
        "attention": "flex" if learner._policies["agent"].logprob_model._flex else "blocks",
    }


def kernels(bench: Bench, learner: LocalLearner, rows: Sequence[TrainRow]) -> int | None:
    """Kernels that an update launches; None without a GPU."""
    if bench.device != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        learner.update("agent", rows)
    return sum(event.count for event in profile.key_averages())


def forecast(name: str, dtype: str, tokens: int, row: int) -> float:
    """Bytes that `cotune doctor` says the learner takes on this GPU, without the context."""
    config = convert({"model": name, "policies": "lora"})
    config = msgspec.structs.replace(config, learner=ForcedSettings(dtype=dtype, micro_batch_tokens=tokens))
    free, total = (float(size) for size in torch.cuda.mem_get_info())
    size = measure(config_of(name), LORA, dtype, joined=True, device="cuda")
    load = Workload(row=row, sequences=1, policies=1)
    plan = learner_memory(size, config, load, device="cuda", free=free, total=total)
    return plan.bytes - plan.parts["context of the GPU"]


def rollouts(bench: Bench) -> Iterator[Figures]:
    """The engine in the process: so many calls at once with eight candidates each; and transformers' `generate`."""
    name = "tiny" if bench.tiny else MIDDLE
    prompt, tokens, n = bench.size(512, 16), bench.size(128, 8), bench.size(8, 2)
    vocabulary = config_of(name).vocab_size
    names = ("first", "second")
    engine, learner = open_engine(name, bench), open_learner(name, bench, names=names)
    try:
        for adapters in range(3):
            if adapters:
                engine.publish(learner, names[adapters - 1])
            policies = names[:adapters] or ("nobody",)
            for calls in (1, 8, 64, 256) if not bench.tiny else (1, 3):
                if bench.time_is_up:
                    yield {"left_out": f"{calls} calls with {adapters} adapters"}
                    continue
                prompts = [row.prompt_ids for row in plain_rows(calls, prompt, 1, vocabulary, seed=calls)]
                engine.draw(prompts[:1], n=n, tokens=4, policies=policies)
                free_memory(bench)
                began = time.perf_counter()
                answers = engine.draw(prompts, n=n, tokens=tokens, policies=policies)
                seconds = time.perf_counter() - began
                drawn = sum(len(one.token_ids) for candidates in answers for one in candidates)
                yield {
                    "model": name,
                    "calls": calls,
                    "candidates": n,
                    "adapters": adapters,
                    "tokens": drawn,
                    "tokens_per_second": round(drawn / seconds),
                    "peak_gb": peak_gb(bench),
                }
    finally:
        engine.close()
    yield generate(bench, name, prompt, tokens, rows=bench.size(64, 4))


def generate(bench: Bench, name: str, prompt: int, tokens: int, rows: int) -> Figures:
    """So many rows by transformers' own loop, to compare with."""
    network = build(name, getattr(torch, bench.dtype), bench.device)
    ids = torch.randint(2, config_of(name).vocab_size, (rows, prompt), device=bench.device)
    began = time.perf_counter()
    network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=1,
    )
    wait(bench)
    seconds = time.perf_counter() - began
    return {"model": name, "generate_rows": rows, "tokens_per_second": round(rows * tokens / seconds)}


def step(bench: Bench) -> Iterator[Figures]:
    """Steps of two roles on one device: rollouts, an update of each, and their publication."""
    name = "tiny" if bench.tiny else MIDDLE
    roles = ("planner", "writer")
    prompt, answer, tasks = bench.size(512, 16), bench.size(128, 8), bench.size(32, 2)
    engine, learner = open_engine(name, bench), open_learner(name, bench, names=roles)
    try:
        for number in range(bench.size(3, 1)):
            if bench.time_is_up and number:
                yield {"left_out": f"step {number}"}
                continue
            began = time.perf_counter()
            drawn: dict[str, list[TrainRow]] = {}
            for role in roles:
                tasks_of_role = plain_rows(tasks, prompt, 1, config_of(name).vocab_size, seed=number)
                drawn[role] = engine.rows(role, [row.prompt_ids for row in tasks_of_role], n=4, tokens=answer)
            rolled_out = time.perf_counter()
            for role in roles:
                learner.update(role, drawn[role])
            wait(bench)
            updated = time.perf_counter()
            for role in roles:
                engine.publish(learner, role)
            published = time.perf_counter()
            yield {
                "model": name,
                "step": number,
                "rollouts": round(rolled_out - began, 3),
                "update": round(updated - rolled_out, 3),
                "publish": round(published - updated, 3),
            }
    finally:
        engine.close()


def rest(bench: Bench) -> Iterator[Figures]:
    """Optimizer states of 8 bits, and a teacher on the device."""
    name = small(bench)
    rows = plain_rows(4, bench.size(512, 24), bench.size(128, 8), config_of(name).vocab_size)
    if bench.device == "cuda":
        learner = open_learner(name, bench, optimizer="adamw8bit")
        yield {"optimizer": "adamw8bit", **timed_update(bench, learner, rows)}
        del learner
        free_memory(bench)
    with tempfile.TemporaryDirectory() as folder, made_on_the_device(Path(folder), name) as model:
        teacher = LocalTeacher(model, ForcedSettings(device=bench.device, dtype=bench.dtype))
        seconds = seconds_of(bench, lambda: teacher.logprobs(rows), rounds=1)
        finite = all(np.isfinite(scores).all() for scores in teacher.logprobs(rows))
        yield {"check": "scores of a teacher are finite", "ok": finite, "seconds": round(seconds, 4)}


PARTS: Mapping[str, tuple[float, Callable[[Bench], Iterator[Figures]]]] = {
    "device": (30, device),
    "correctness": (60, correctness),
    "updates": (90, updates),
    "trees": (60, trees),
    "rollouts": (60, rollouts),
    "step": (60, step),
    "rest": (60, rest),
}
"""By name: the seconds that it has of seven minutes, and the function that it runs."""
