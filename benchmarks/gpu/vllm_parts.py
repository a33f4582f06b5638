"""Measurements of a GPU with vLLM and a learner. Each part opens one engine, and its sections share it.

The weights are random, made on the device and written to a folder, as vLLM reads them from files. Prompts are token
ids; the tokenizer, without which vLLM does not start, has a number as each word.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.models import build, config_of, plain_rows
from benchmarks.gpu.tools import LORA, Bench, Engine, Figures, gap, open_learner, wait
from cotune.integrations.versions import versions_of_installed
from cotune.trainer.learner.local import LocalLearner

MODEL = "Qwen3-1.7B"
SEQUENCES = 256 * 8
"""Of the largest load: calls times candidates."""
BESIDE_LEARNER: Mapping[str, Any] = {"gpu_memory_utilization": 0.5, "max_model_len": 4096}

Section = Callable[[Bench, Engine, LocalLearner, str], Iterator[Figures]]


@contextmanager
def model_folder(name: str, bench: Bench) -> Iterator[str]:
    """A model of `SHAPES` as a folder, with the weights that `open_learner` makes."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    with tempfile.TemporaryDirectory() as folder:
        build(name, getattr(torch, bench.dtype), bench.device).save_pretrained(folder)
        words = {str(number): number for number in range(config_of(name).vocab_size)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="0").save_pretrained(folder)
        yield folder


def vllm_engine(folder: str, bench: Bench, kind: Literal["lora", "full"]) -> Engine:
    """vLLM as a run opens it: the sizes are those that cotune chooses."""
    from cotune.integrations.models.vllm.engine import VllmSampler

    beside = BESIDE_LEARNER if bench.device == "cuda" else {"max_model_len": 512}
    opening = VllmSampler.open(
        folder,
        weights=kind,
        policies=1,
        sequences=bench.size(SEQUENCES, 8),
        sleeps=True,
        engine_args=dict(beside),
    )
    return Engine(opening, LORA if kind == "lora" else None)


def adapters(bench: Bench) -> Iterator[Figures]:
    """Adapters: opening, gap, publication, rollouts, sleep and wake."""
    yield from measure(bench, "lora", (gaps, publications, loads, sleeping))


def full(bench: Bench) -> Iterator[Figures]:
    """Full weights: opening and publication."""
    yield from measure(bench, "full", (full_weights,))


def measure(bench: Bench, kind: Literal["lora", "full"], sections: Sequence[Section]) -> Iterator[Figures]:
    """Open a learner and an engine, and run the sections; one that fails is a line."""
    name = "tiny" if bench.tiny else MODEL
    with model_folder(name, bench) as folder:
        yield dict(versions_of_installed(("torch", "vllm", "transformers")))
        began = time.perf_counter()
        engine = vllm_engine(folder, bench, kind)
        try:
            yield {"model": name, "weights": kind, "opening_seconds": round(time.perf_counter() - began, 1)}
            learner = open_learner(name, bench, kind=kind)
            yield from run_sections(bench, engine, learner, name, sections)
        finally:
            engine.close()


def run_sections(
    bench: Bench, engine: Engine, learner: LocalLearner, name: str, sections: Sequence[Section]
) -> Iterator[Figures]:
    """The figures of all sections; a failed section does not end the others."""
    for section in sections:
        if bench.time_is_up:
            yield {"left_out": section.__name__}
            continue
        try:
            yield from section(bench, engine, learner, name)
        except Exception as error:  # noqa: BLE001
            where = traceback.format_exc()[-2000:]
            yield {"section": section.__name__, "failed": f"{type(error).__name__}: {error}", "where": where}


def prompts_for(bench: Bench, name: str, calls: int, seed: int = 0) -> list[tuple[int, ...]]:
    rows = plain_rows(calls, bench.size(512, 8), 1, config_of(name).vocab_size, seed=seed)
    return [row.prompt_ids for row in rows]


def gaps(bench: Bench, engine: Engine, learner: LocalLearner, name: str) -> Iterator[Figures]:
    """Log-probabilities of engine and learner, after a publication of the untrained and of an updated adapter."""
    prompts, tokens = prompts_for(bench, name, 8), bench.size(64, 8)
    engine.publish(learner)
    yield gap(engine, learner, "vLLM against learner, untrained", prompts, tokens)
    learner.update("agent", engine.last)
    engine.publish(learner)
    yield gap(engine, learner, "vLLM against learner, published", prompts, tokens)


def publications(bench: Bench, engine: Engine, learner: LocalLearner, name: str) -> Iterator[Figures]:
    """Seconds of an adapter's publication, and of the first tokens by it."""
    for number in range(bench.size(3, 1)):
        began = time.perf_counter()
        engine.publish(learner)
        published = time.perf_counter()
        engine.draw(prompts_for(bench, name, 1), n=1, tokens=1)
        first_token = time.perf_counter() - published
        seconds = published - began
        yield {"publication": number, "seconds": round(seconds, 3), "first_token_seconds": round(first_token, 3)}


def loads(bench: Bench, engine: Engine, learner: LocalLearner, name: str) -> Iterator[Figures]:
    """Tokens a second of 64 and of 256 calls at once, with eight candidates each."""
    tokens, n = bench.size(256, 8), bench.size(8, 2)
    for calls in (64, 256) if not bench.tiny else (2, 4):
        if bench.time_is_up:
            yield {"left_out": f"{calls} calls"}
            continue
        began = time.perf_counter()
        answers = engine.draw(prompts_for(bench, name, calls, seed=calls), n=n, tokens=tokens)
        seconds = time.perf_counter() - began
        drawn = sum(len(one.token_ids) for candidates in answers for one in candidates)
        rate = round(drawn / seconds)
        yield {"calls": calls, "candidates": n, "tokens": drawn, "tokens_per_second": rate}


def sleeping(bench: Bench, engine: Engine, learner: LocalLearner, name: str) -> Iterator[Figures]:
    """Seconds to sleep and to wake, the memory that sleep frees, and whether the engine draws the same afterwards."""
    prompts = prompts_for(bench, name, 4)
    before = engine.rows("agent", prompts, n=2, tokens=8)
    free = free_bytes(bench)
    began = time.perf_counter()
    engine.sleep()
    asleep = time.perf_counter()
    freed = free_bytes(bench) - free
    engine.wake()
    awake = time.perf_counter()
    yield {
        "sleep_seconds": round(asleep - began, 3),
        "wake_seconds": round(awake - asleep, 3),
        "freed_gb": round(freed / 1e9, 2),
    }

    after = engine.rows("agent", prompts, n=2, tokens=8)
    unchanged = [row.response_ids == other.response_ids for row, other in zip(after, before, strict=True)]
    yield {"same_answers_after_waking": sum(unchanged), "answers": len(unchanged)}
    yield gap(engine, learner, "vLLM against learner, after waking", prompts, bench.size(64, 8))


def free_bytes(bench: Bench) -> int:
    """Free memory of the GPU; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if bench.device == "cuda" else 0


def full_weights(bench: Bench, engine: Engine, learner: LocalLearner, name: str) -> Iterator[Figures]:
    """Seconds of publications of full weights, and the gap after them."""
    prompts, tokens = prompts_for(bench, name, 8), bench.size(64, 8)
    for number in range(bench.size(2, 1)):
        wait(bench)
        began = time.perf_counter()
        engine.publish(learner)
        yield {"full_publication": number, "seconds": round(time.perf_counter() - began, 2)}
    yield gap(engine, learner, "vLLM against learner, full weights", prompts, tokens)


VLLM_PARTS: Mapping[str, tuple[float, Callable[[Bench], Iterator[Figures]]]] = {
    "adapters": (420, adapters),
    "full": (240, full),
}
"""By name: the seconds that it has of eleven minutes, most to open the engine, and the function that it runs."""
