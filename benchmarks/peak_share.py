"""The share of the processor's measured rate in matrix products that each phase of training reaches, on one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.peak_share [--rounds 20]

SmolLM2-135M with a LoRA of rank 16. The rate is for 3,072 rows times a layer of 1,536 x 576. A phase is counted as
2 operations for each weight and token, 4 if a gradient goes through it; adapters, attention and drawing are not
counted, so that no phase can reach all of it. Of a decode step, torch's profiler gives the time of all matrix products,
adapters and attention included. Times are processor time, medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from benchmarks.decode_controls import LORA, adapter
from benchmarks.memory import make_rows
from cotune.algorithms.catalogue import recipe
from cotune.integrations.models.bfloat16 import has_bfloat16
from cotune.integrations.models.child.wire import Command
from cotune.integrations.models.float32 import prefers_onednn, product
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers.engine import DecodingEngine, load
from cotune.integrations.models.transformers.rows import Job
from cotune.integrations.models.transformers.wire import ModelSource
from cotune.records.policies import policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.learner.local import LocalLearner
from examples.word_problems.demo import pretrained
from tests.trainer.learner.forced import ForcedSettings

K, PROMPT, ROWS, ANSWER = 8, 64, 32, 32
PRODUCTS = {"mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"}


def seconds(do: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None) -> float:
    """The median of its processor time, after two calls that warm up; `before` goes ahead of each."""
    spent = []
    for _ in range(rounds + 2):
        before()
        began = time.process_time()
        do()
        spent.append(time.process_time() - began)
    return statistics.median(spent[2:])


def rate(dtype: str, rounds: int, multiply: Callable[[torch.Tensor, torch.Tensor], object] = product) -> float:
    """Operations a second of a large product."""
    x, weight = torch.randn(3072, 576), torch.randn(1536, 576)
    if dtype == "bfloat16":
        x, weight = x.bfloat16(), weight.bfloat16()
    return 2 * 3072 * 576 * 1536 / seconds(lambda: multiply(x, weight), rounds)


class Engine:
    """The in-process sampler's engine without its process."""

    def __init__(self, folder: str, dtype: str) -> None:
        source = ModelSource(folder, "cpu", dtype, torch.get_num_threads(), 1024, 1 << 22, None, (), 0)
        self.engine: DecodingEngine = load(source, lambda replies: None)
        self.engine._handle(Command("publish", 1, (PolicyRef("a", 1), adapter(folder), LORA)))
        self.batch = self.engine._base

    def admit(self, prompts: int, k: int, new: int) -> None:
        self.batch.rows = self.batch.cache.window.rows = 0
        drawn = np.random.default_rng(0).integers(16, self.batch.vocabulary, (prompts, PROMPT)).tolist()
        params = SamplingParams(temperature=1.0, max_tokens=new)
        self.batch.admit([Job(i, tuple(prompt), k, params, 1, new, i) for i, prompt in enumerate(drawn)])

    def decode(self, rows: int, rounds: int) -> tuple[float, float]:
        """Seconds of a step of so many rows, the candidates of prompts that have K each, and of its products."""
        self.admit(max(1, rows // K), min(rows, K), 2 * rounds + 10)
        spent = seconds(self.batch.step, rounds)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(rounds):
                self.batch.step()
        products = sum(e.self_cpu_time_total for e in profile.key_averages() if e.key in PRODUCTS)
        return spent, products / rounds / 1e6

    def prefill(self, rounds: int) -> float:
        """Seconds of 32 prompts, without their first step."""
        return seconds(lambda: self.admit(ROWS, 1, 8), rounds)


def update(folder: str, dtype: str) -> tuple[float, float, float]:
    """Seconds of an update of 32 rows in groups of 8, its tokens, and those with logits."""
    settings = ForcedSettings(lr=1e-4, mini_batch=ROWS, device="cpu", dtype=dtype, threads=torch.get_num_threads())
    learner = LocalLearner.open(folder, policies_for("lora", ["a"], LORA), settings, recipe("at_grpo").loss)
    rows, metrics = make_rows(folder, ROWS), dict[str, Any]()
    spent = seconds(lambda: metrics.update(learner.update("a", rows)), 3)
    return spent, metrics["computed_tokens"], metrics["tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    folder = str(locate_model(pretrained()))
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    head = config.vocab_size * config.hidden_size
    wide = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    layer = (
        2 * config.hidden_size**2 + 2 * wide * config.hidden_size + 3 * config.hidden_size * config.intermediate_size
    )
    layers = config.num_hidden_layers * layer
    figures: dict[str, Any] = {}
    print(f"{'phase':40} {'CPU ms':>9} {'products':>9} {'billion operations':>19} {'share':>7}")
    for dtype in ("float32", *(["bfloat16"] if has_bfloat16() else [])):
        peak = rate(dtype, args.rounds)
        print(f"{f'{dtype}: a large product':40} {'':19} {peak / 1e9:17,.0f}/s {1:7.0%}", flush=True)
        if dtype == "float32" and prefers_onednn():
            mkl_rate = figures["float32: rate by MKL"] = round(rate(dtype, args.rounds, linear) / 1e9)
            print(f"{'float32: the same by MKL':40} {'':19} {mkl_rate:17,}/s {1e9 * mkl_rate / peak:7.0%}")
        engine = Engine(folder, dtype)
        cases, products = dict[str, tuple[float, float]](), dict[str, float]()
        for rows in (1, 8, 64):
            name = f"decode step, {rows} row" + "s" * (rows > 1)
            spent, products[name] = engine.decode(rows, args.rounds)
            cases[name] = spent, 2 * rows * (layers + head)
        cases[f"prefill, {ROWS} prompts of {PROMPT}"] = (
            engine.prefill(max(3, args.rounds // 4)),
            2 * ROWS * (PROMPT * layers + head),
        )
        del engine
        spent, tokens, with_logits = update(folder, dtype)
        cases[f"update, {ROWS} rows of {PROMPT} + {ANSWER}"] = (spent, 4 * (tokens * layers + with_logits * head))
        for name, (taken, operations) in cases.items():
            share = operations / taken / peak
            figures[f"{dtype}: {name}"] = {"cpu_ms": round(1000 * taken, 1), "share": round(share, 2)}
            product_ms = ""
            if name in products:
                product_ms = f"{1000 * products[name]:.1f}"
                figures[f"{dtype}: {name}"]["products_ms"] = float(product_ms)
            amounts = f"{1000 * taken:9,.1f} {product_ms:>9} {operations / 1e9:19,.1f}"
            print(f"{f'{dtype}: {name}':40} {amounts} {share:7.0%}", flush=True)
        figures[f"{dtype}: rate"] = round(peak / 1e9)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
