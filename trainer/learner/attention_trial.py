"""A trial on the GPU, before the first update, of two kinds of attention over token trees.

Which one is faster depends on the GPU and the versions of torch and Triton, so it is measured. The two round
differently, so the verdict is stored in the state folder: a run that is resumed or repeated on this machine attends in
the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from cotune.errors import error_line
from cotune.storage.state_folder import load_result, store_result
from cotune.trainer.learner import tree_attention
from cotune.trainer.learner.dist import ProcessGroup
from cotune.trainer.learner.token_tree import token_tree
from cotune.trainer.learner.tree_attention import FLEX_BLOCK, BlockedAttention, FlexAttention

log = logging.getLogger("cotune")

KIND = "attention_trials"
"""The folder of verdicts in the state folder."""

SCALE = 128
"""The timed tree has 32 times as many tokens: 4,096, about a pass of a few episodes."""
ROUNDS = 5
"""The number of timed rounds. Only the fastest counts. One more round before them compiles and warms up."""
CLEARLY_FASTER = 0.9
"""FlexAttention must take at most this share of the time of blocks. It compiles kernels for half a minute or more,
which a small gain does not pay for, and repeated measurements differ by some percent."""
TOLERANCE = {torch.float32: 3e-3}
"""The largest allowed difference of outputs and gradients, as a share of their norm. Tensor cores round float32 to
TF32."""
HALF_TOLERANCE = 5e-2
"""The tolerance in half precision."""

_SOURCE = hashlib.sha256(Path(tree_attention.__file__).read_bytes()).hexdigest()
"""The digest of the code that the trial measures. A stored verdict is used only with the same code."""

Attention = BlockedAttention | FlexAttention
States = tuple[Tensor, Tensor, Tensor]


class AttentionShape(NamedTuple):
    """The size of a network's attention."""

    heads: int
    """Heads of queries."""
    groups: int
    """Heads of keys and values."""
    width: int
    """The width of a head."""


class _OtherValues(Exception):
    """FlexAttention computes other values than `BlockedAttention`."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial, and the line that says why."""

    flex: bool
    line: str


def prefers_flex(network: Any, dtype: torch.dtype, *, autocast: bool, group: ProcessGroup) -> bool:
    """Whether `network`, trained in `dtype` on a GPU, attends over trees faster by FlexAttention than in blocks.

    Always False on a CPU, and for networks whose values have another width than their queries. Rank 0 decides for all
    ranks of `group`, so all must call this.
    """
    device = network.get_input_embeddings().weight.device
    if device.type != "cuda":
        return False
    shape = attention_shape(network.config.get_text_config())
    if shape is None:
        return False
    is_faster = group.rank == 0 and tried_once(shape, device, dtype, autocast=autocast).flex
    # The other ranks contribute 0, so the maximum is the verdict of rank 0.
    return bool(group.max(torch.tensor([int(is_faster)], device=device)).item())


def attention_shape(config: Any) -> AttentionShape | None:
    """Return the shape of a network's attention. None for multi-head latent attention (MLA), whose queries and values
    differ in width: the trial does not cover it."""
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    value_width = int(getattr(config, "v_head_dim", None) or width)
    if value_width != width or getattr(config, "kv_lora_rank", None):
        return None
    return AttentionShape(heads, groups, width)


@cache
def tried_once(shape: AttentionShape, device: torch.device, dtype: torch.dtype, *, autocast: bool) -> Verdict:
    """Return the stored verdict of an earlier trial on this kind of GPU with these versions, or make a trial now.

    The verdict of a trial that failed is not stored. The next run makes the trial again: by then, a compiler may be
    installed or memory may be free.
    """
    gpu = torch.cuda.get_device_name(device)
    key = msgspec.json.encode([shape, str(dtype), autocast, gpu, str(torch.__version__), _triton_version(), _SOURCE])
    verdict = load_result(KIND, key, Verdict)
    if verdict is not None:
        log.info("%s (tried earlier)", verdict.line)
        return verdict

    log.info("Trying FlexAttention on this GPU. It compiles kernels, which may take a minute.")
    try:
        verdict, is_complete = try_flex(shape, device, dtype, autocast=autocast)
    finally:
        torch.cuda.empty_cache()  # a sampler may be on the same GPU
    if is_complete:
        store_result(KIND, key, verdict)
    return verdict


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def try_flex(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, *, autocast: bool
) -> tuple[Verdict, bool]:
    """Run both kinds of attention forward and backward, choose one, and log why. Returns the verdict, and whether the
    trial was completed, so that its verdict can be stored.

    FlexAttention is not chosen if it fails, for example without Triton, with too little shared memory for its backward
    kernel, or if memory runs out. It is not chosen either if it computes other values or is not clearly faster.
    """
    try:
        # Compare values on three trees: the compiler makes one kernel for trees of one block, and another one for all
        # larger trees. The last tree, which is the largest, is also used to compare times.
        for sequences in (one_block(), two_turns(16), two_turns(SCALE)):
            tree = token_tree(sequences)
            states = _random_states(shape, len(tree.tokens), device, dtype)
            flex = FlexAttention(tree, device)
            blocks = BlockedAttention(tree, device)
            with torch.autocast(device.type, dtype=dtype, enabled=autocast):
                _check_equal(flex, blocks, states)
        with torch.autocast(device.type, dtype=dtype, enabled=autocast):
            flex_seconds = fastest_seconds(lambda: _forward_and_backward(flex, states), device)
            blocks_seconds = fastest_seconds(lambda: _forward_and_backward(blocks, states), device)
    except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own
        cause = getattr(error, "inner_exception", error)  # dynamo wraps the errors of its compiler
        line = f"Rows attend by SDPA, because FlexAttention does not work here ({error_line(cause)})"
        log.warning("%s", line)
        return Verdict(flex=False, line=line), False

    is_faster = flex_seconds <= CLEARLY_FASTER * blocks_seconds
    line = (
        f"Rows attend by {'FlexAttention' if is_faster else 'SDPA'}: a layer's attention over {len(tree.tokens)} "
        f"tokens takes {1e3 * flex_seconds:.2f} ms by FlexAttention and {1e3 * blocks_seconds:.2f} ms by SDPA"
    )
    log.info("%s", line)
    return Verdict(flex=is_faster, line=line), True


def one_block() -> list[list[int]]:
    """Two sequences that fit into one block of FlexAttention's mask."""
    trunk = list(range(FLEX_BLOCK // 2))
    return [trunk, [*trunk[:20], *range(1000, 1030)]]


def two_turns(scale: int) -> list[list[int]]:
    """Return the token sequences of two turns: a prompt with eight answers, and a second prompt, which continues the
    first answer, with eight answers of its own.

    Their tree has 32 times `scale` tokens.
    """
    next_token = 0

    def new_tokens(count: int) -> list[int]:
        """Return token ids that no earlier call has returned, so that sequences share only their prompts."""
        nonlocal next_token
        first = next_token
        next_token += count
        return list(range(first, next_token))

    prompt = new_tokens(8 * scale)
    answers = [new_tokens(3 * scale // 2) for _ in range(8)]
    second_prompt = prompt + answers[0] + new_tokens(4 * scale)
    first_turn = [prompt + answer for answer in answers[1:]]
    second_turn = [second_prompt + new_tokens(scale) for _ in range(8)]
    return first_turn + second_turn


def _random_states(shape: AttentionShape, tokens: int, device: torch.device, dtype: torch.dtype) -> States:
    """Return random queries [1, heads, tokens, width], and keys and values [1, groups, tokens, width], all with
    gradients."""
    generator = torch.Generator().manual_seed(0)

    def states(heads: int) -> Tensor:
        drawn = torch.randn(1, heads, tokens, shape.width, generator=generator)
        return drawn.to(device, dtype).requires_grad_()

    return states(shape.heads), states(shape.groups), states(shape.groups)


def _forward_and_backward(attention: Attention, states: States) -> list[Tensor]:
    """Return the output [tokens, heads, width] of the attention, and the gradients of `states`."""
    output = attention(*states, None)
    return [output, *torch.autograd.grad(output.float().square().sum(), states)]


def _check_equal(flex: FlexAttention, blocks: BlockedAttention, states: States) -> None:
    """Raise _OtherValues unless both kinds of attention have equal outputs and gradients."""
    computed = _forward_and_backward(flex, states)  # the output, then gradients
    expected = _forward_and_backward(blocks, states)
    # FlexAttention has another kernel for passes without gradients. Its output must be the same.
    with torch.no_grad():
        computed.append(flex(*states, None))
        expected.append(expected[0])
    tolerance = TOLERANCE.get(states[0].dtype, HALF_TOLERANCE)
    for values, expected_values in zip(computed, expected, strict=True):
        difference = values.float() - expected_values.float()
        # Written so that it also raises for NaN.
        if not difference.norm() <= tolerance * expected_values.float().norm():
            raise _OtherValues("it computes other values")


def fastest_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of `ROUNDS` rounds. They include the time of the host to start the kernels."""
    wait: Callable[[], object] = contextlib.nullcontext  # a CPU has nothing to wait for
    if device.type == "cuda":
        wait = torch.cuda.synchronize
    work()
    seconds = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
