"""Operators that a GPU is asked for in one forward and backward pass of the learner, about a kernel each.

    python -m benchmarks.operators [--layers 28] [--kind lora] [--checkpoint] [--plain] [--unshared] [--pass 2]

Each costs the host about 5 microseconds to launch, whatever its size, so short passes wait for the host. The count does
not depend on widths, so the model is a narrow Qwen3 on a pretended GPU (`tests.pretend_gpu`), with the code paths of a
real one; its attention counts as one operator forward and one backward. The pass has the shape of 8 answers to one
prompt, 8,192 tokens in all: 28 chunks of logits. Views and work on the CPU are not counted. A fused kernel of a library
counts as one operator; `--plain` counts without them. `--pass 1` is the first pass of an optimizer step, in which no
gradients are there to add to. The last line is JSON.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests import pretend_gpu  # isort: skip - before the modules that it changes are imported

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.liger.kernels import Kernels
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner import fused_layers, load, logprobs, tree_attention
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.forced import ForcedSettings

VIEWS = (
    "_local_scalar", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "empty", "expand",
    "is_", "lift_fresh", "narrow", "new_empty", "permute", "prim.", "reshape", "select.", "slice.", "split", "squeeze",
    "sym_", "t.", "transpose", "unbind", "unflatten", "unsqueeze", "view",
)  # fmt: skip
"""Operators without a kernel."""
CANDIDATES, PROMPT, CHUNK, CHUNKS = 8, 40, 16, 28
VOCABULARY = 512


def build_network(layers: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_window_layers=layers,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def make_rows() -> list[TrainRow]:
    """Answers to one prompt, with as many tokens as fill the chunks."""
    tokens = CHUNK * CHUNKS // CANDIDATES
    rows = []
    for number in range(CANDIDATES):
        answer = tuple((7 * number + place) % VOCABULARY for place in range(tokens))
        rows.append(
            TrainRow(
                id=str(number),
                role="agent",
                prompt_ids=tuple(range(PROMPT)),
                response_ids=answer,
                logprobs=(-1.0,) * tokens,
                advantage=1.0 if number % 2 else -1.0,
            )
        )
    return rows


def plain_norm(x: Any, weight: Any, eps: float) -> Any:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_rotation(query: Any, key: Any, cos: Any, sin: Any) -> Any:
    return modeling_qwen3.apply_rotary_pos_emb(query, key, cos, sin)


def stand_ins(counter: Counter) -> Kernels:
    """In place of a library's kernels; each counts as one operator."""
    return Kernels(
        norm=counter.fuse("fused norm", plain_norm),
        rotate=counter.fuse("fused rotation", plain_rotation),
        silu_product=counter.fuse("fused silu product", lambda gate, up: torch.nn.functional.silu(gate) * up),
    )


class Counter:
    """Counts the requests to the pretended GPU, by operator."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._paused = False
        self._computed = pretend_gpu._computed
        pretend_gpu._computed = self._count

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        on_gpu = any(isinstance(each, pretend_gpu.OnGpu) for each in pretend_gpu._tensors((*args, *kwargs.values())))
        if not self._paused and (on_gpu or (device is not None and torch.device(device).type != "cpu")):
            name = str(func).removeprefix("aten.")
            self.counts["view" if name.startswith(VIEWS) else name] += 1
        return self._computed(func, args, kwargs)

    @contextmanager
    def kernel(self, name: str) -> Iterator[None]:
        """Count all that happens inside as one kernel."""
        if not self._paused:
            self.counts[name] += 1
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def fuse(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one kernel forward and one backward."""
        counter = self

        class Fused(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                ctx.save_for_backward(*(each for each in args if isinstance(each, torch.Tensor)))
                ctx.args = [None if isinstance(each, torch.Tensor) else each for each in args]
                with counter.kernel(name):
                    return function(*args)

            @staticmethod
            def backward(ctx: Any, *above: Any) -> Any:
                saved = list(ctx.saved_tensors)
                with counter.kernel(f"{name} backward"), torch.enable_grad():
                    args = [saved.pop(0).detach() if each is None else each for each in ctx.args]
                    needed = [place for place, needs in enumerate(ctx.needs_input_grad) if needs]
                    for place in needed:
                        args[place].requires_grad_()
                    found = torch.autograd.grad(function(*args), [args[place] for place in needed], above)
                gradients = [None] * len(args)
                for place, gradient in zip(needed, found, strict=True):
                    gradients[place] = gradient
                return tuple(gradients)

        return Fused.apply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--kind", choices=["lora", "full"], default="lora")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--checkpoint", action="store_true", help="compute layers again in the backward pass")
    parser.add_argument("--plain", action="store_true", help="without the kernels of a library")
    parser.add_argument("--unshared", action="store_true", help="rows without their tree")
    parser.add_argument("--pass", type=int, default=2, dest="number")
    parser.add_argument("--most", type=int, default=25, help="lines of the table")
    args = parser.parse_args()

    # A learner as on a GPU, with random weights.
    counter = Counter()
    attention = tree_attention.scaled_dot_product_attention

    def sdpa(query: Any, key: Any, value: Any, *, attn_mask: Any, is_causal: bool, scale: Any, enable_gqa: bool) -> Any:
        def attend(query: Any, key: Any, value: Any) -> Any:
            return attention(
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )

        return counter.fuse("attention", attend)(query, key, value)

    tree_attention.scaled_dot_product_attention = sdpa
    if not args.plain:
        fused_layers.load_kernels = lambda: stand_ins(counter)
    torch.set_num_threads(1)
    network = build_network(args.layers)
    folder = tempfile.mkdtemp()
    network.config.save_pretrained(folder)
    load._load = lambda path, dtype, device, settings: copy.deepcopy(network).to(getattr(torch, dtype)).to(device)
    logprobs.chunk_tokens = lambda vocabulary, device: CHUNK
    pretend_gpu.pretend()
    settings = ForcedSettings(dtype=args.dtype, device="cuda", shared_prompts=not args.unshared)
    policies = policies_for(args.kind, ["agent"], LoraSpec(rank=16, alpha=32.0))
    learner = LocalLearner.open(folder, policies, settings, LossSpec())
    model = learner._policies["agent"]
    model.logprob_model.checkpointing.on = args.checkpoint

    rows = make_rows()
    counts = counter.counts
    for _ in range(args.number):
        counts.clear()
        values, _ = model.token_logprobs(rows)
        forward = counts.total() - counts["view"]
        values.sum().backward()
    views = counts.pop("view", 0)

    # Report.
    print(f"{'operator':44} {'times':>6}  per layer")
    for name, times in counts.most_common(args.most):
        print(f"{name:44} {times:6}  {times / args.layers:9.1f}")
    total = counts.total()
    print(f"{'all':44} {total:6}  {total / args.layers:9.1f}   (and {views} views)")
    line = {
        "benchmark": "operators",
        "layers": args.layers,
        "kind": args.kind,
        "dtype": args.dtype,
        "checkpointed": args.checkpoint,
        "shared": not args.unshared,
        "fused": not args.plain,
        "pass": args.number,
        "operators": total,
        "forward": forward,
        "casts": counts["_to_copy.default"],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
