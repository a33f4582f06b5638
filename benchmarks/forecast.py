"""The learner's memory on a GPU: the forecast of `cotune doctor` and a peak that is counted without a GPU.

    python -m benchmarks.forecast [--models Qwen3-0.6B,Qwen3-8B] [--dtype bfloat16]

Counted: one pass of a learner, forward and backward, in the shapes of the whole model and along the code of a GPU, on
tensors that have shapes and no memory (torch's FakeTensorMode). Every storage counts from the operator that makes it
until nothing refers to it. The pass is not the first one of an update: gradients and the optimizer's moments are
there. The gaps of a GPU's allocator cannot be counted: both columns contain the 5% of a pass that `doctor` adds for
them. The 0.5 GB that `doctor` adds for the GPU's context are in neither. Rows of 1,024 tokens share half of them.
Layers compute with their adapters in one step; fused kernels of a library are not counted. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.qwen3 import QWEN3, Shape, qwen3_config
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models import float32
from cotune.records.policies import LoraSpec
from cotune.trainer.before.doctor.memory import ALLOCATOR, CONTEXT, Workload, learner_memory
from cotune.trainer.before.doctor.model_size import empty_policy, measure
from cotune.trainer.config.load import convert
from cotune.trainer.learner import logprobs, tree_attention
from cotune.trainer.learner.batching import pass_tokens
from tests.trainer.learner.forced import ForcedSettings

LORA = LoraSpec(rank=16, alpha=32.0)
ROW = 1024
SHAPES = {**QWEN3, "tiny": Shape(128, 384, 6, 4, 2, vocabulary=4_096, head_width=32)}
PASSES = {False: 2048, True: 8192}
"""Tokens of a pass, by whether it is checkpointed."""


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that operators have made and something still refers to, and the most there have been."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self._collected_at = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._fused_sdp_choice.default:
            return _kernel_of_gpu(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return result

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, unless it is counted."""
        storage = tensor.untyped_storage()
        if storage not in self._known:
            size = self._known[storage] = storage.nbytes()
            weakref.finalize(storage, self._forget, size)
            self.live += size
            # Tensors without storage are in reference cycles, which real ones are not.
            if self.live > self.peak and self.live > 1.02 * self._collected_at:
                gc.collect()
                self._collected_at = self.live
            self.peak = max(self.peak, self.live)

    def restart(self) -> None:
        """Forget the peak, and everything that nothing refers to."""
        gc.collect()
        gc.freeze()  # so that later collections look at new objects only
        self.peak = self._collected_at = self.live

    def _forget(self, size: int) -> None:
        self.live -= size


def _kernel_of_gpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_: Any, **more: Any) -> int:
    """The answer of `_fused_sdp_choice` on a GPU: 1, the flash kernel, for half precision without a mask; else 2, the
    memory-efficient one."""
    mask = more.get("attn_mask", mask)
    return 1 if mask is None and query.dtype in (torch.bfloat16, torch.float16) else 2


@contextmanager
def code_of_gpu() -> Iterator[None]:
    """Take the branches of a GPU with tensors of the CPU: backward passes over tensors of a GPU ask for its driver."""

    def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and (mask is not None or query.dtype == torch.float32):
            key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip

    def widened_product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.empty(len(x), len(weight), dtype=torch.float32)

    with ExitStack() as patches:
        for owner, name, replacement in (
            (tree_attention, "_attend_by_sdpa", sdpa),
            (tree_attention, "_attend", lambda *states: (sdpa(*states), None)),
            (logprobs, "widened_product", widened_product),
            (logprobs, "chunk_tokens", lambda vocabulary, device: logprobs.CHUNK_ROWS["cuda"]),
            (float32, "prefers_onednn", lambda: False),
        ):
            patches.enter_context(patch.object(owner, name, replacement))
        yield


def shape(name: str) -> Any:
    """The configuration of a model of `SHAPES`."""
    return qwen3_config(SHAPES[name])


def make_rows(tokens: int) -> list[TrainRow]:
    """Rows of `ROW` tokens whose first half is the same, with about so many distinct tokens together."""
    half = ROW // 2
    rows = max(1, tokens // half - 1)
    return [
        TrainRow(
            id=str(number),
            role="a",
            prompt_ids=tuple(range(half)),
            response_ids=(number, *range(1, half)),
            logprobs=(),
            advantage=1.0,
        )
        for number in range(rows)
    ]


def counted_peaks(config: Any, lora: LoraSpec | None, dtype: str, passes: dict[bool, int]) -> dict[bool, int]:
    """Bytes that a learner holds at most in a pass of so many tokens, by whether its layers are checkpointed."""
    empty = empty_policy(config, lora, dtype, joined=lora is not None, device="cuda", whole=True)
    policy, live = empty.policy, LiveBytes()
    peaks = {}
    with code_of_gpu(), empty.mode, live:
        for parameter in policy.network.parameters():
            live.add(parameter)
        trained = list(policy.parameters().values())
        held = []
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
            held += [torch.zeros_like(parameter), torch.zeros_like(parameter)]  # AdamW's moments
        for checkpointed, tokens in passes.items():
            rows = make_rows(tokens)
            policy.logprob_model.checkpointing.on = checkpointed
            live.restart()
            values, entropy = policy.token_logprobs(rows)
            values.sum().backward()
            peaks[checkpointed] = live.peak
            del values, entropy
    gc.unfreeze()
    return peaks


def forecasts(name: str, config: Any, lora: LoraSpec | None, dtype: str, passes: dict[bool, int]) -> dict[bool, Any]:
    """The forecast of `doctor` for the same passes."""
    size = measure(config, lora, dtype, joined=True, device="cuda")
    by_checkpointing = {}
    for checkpointed, tokens in passes.items():
        kind = "lora" if lora else "full"
        run = convert({"model": name, "policies": kind, "lora": {"rank": LORA.rank}})
        learner = ForcedSettings(
            dtype=dtype, micro_batch_tokens=tokens, mini_batch=1, activation_checkpointing=checkpointed
        )
        run = msgspec.structs.replace(run, learner=learner)
        tokens = pass_tokens(make_rows(tokens), True)
        load = Workload(row=tokens, sequences=1, policies=1)
        by_checkpointing[checkpointed] = learner_memory(size, run, load, device="GPU", free=1e15, total=1e15)
    return by_checkpointing


def compare(name: str, dtype: str, passes: dict[bool, int]) -> Iterator[dict[str, Any]]:
    """Forecast and count of one model, LoRA and full, plain and checkpointed."""
    config = shape(name)
    for kind, lora in (("lora", LORA), ("full", None)):
        peaks = counted_peaks(config, lora, dtype, passes)
        for checkpointed, plan in forecasts(name, config, lora, dtype, passes).items():
            part = next(size for part, size in plan.parts.items() if part.startswith("a pass"))
            forecast = plan.bytes - CONTEXT
            counted = peaks[checkpointed] + (1 - 1 / ALLOCATOR) * part
            yield {
                "model": name,
                "kind": kind,
                "checkpointed": checkpointed,
                "tokens": plan.pass_tokens,
                "forecast_gb": forecast / 1e9,
                "counted_gb": counted / 1e9,
                "ratio": forecast / counted,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Qwen3-0.6B,Qwen3-1.7B,Qwen3-4B,Qwen3-8B", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    print(f"{'model':12} {'kind':5} {'pass':>20} {'forecast, GB':>13} {'counted, GB':>12} {'ratio':>6}")
    ratios = {}
    for name in args.models.split(","):
        for row in compare(name, args.dtype, PASSES):
            how = ", checkpointed" if row["checkpointed"] else ""
            pass_ = f"{row['tokens']}{how}"
            figures = f"{row['forecast_gb']:13.2f} {row['counted_gb']:12.2f} {row['ratio']:6.2f}"
            print(f"{name:12} {row['kind']:5} {pass_:>20} {figures}", flush=True)
            ratios[f"{name} {row['kind']}{how}"] = round(row["ratio"], 3)
    print(json.dumps({"forecast_over_counted": ratios}))


if __name__ == "__main__":
    main()
