"""The tables [learner] and [schedule]: how weights are updated."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from cotune.config.sizes import parse_size
from cotune.errors import ConfigError, check_bounds


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[schedule] Learning rate over the run, as a factor on `learner.lr`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """constant, or decay to zero at the last step: linear | cosine."""


class LearnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """[learner] How weights are updated. The defaults are those of the published AT-GRPO recipe."""

    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Precision of the forward pass. Trained weights, optimizer states and logits are float32 in any case. "auto" is
    bfloat16 on a GPU that multiplies it (NVIDIA: Ampere and later), for frozen weights and matrix products, and float32
    on other GPUs. On a CPU with AVX512-BF16 or AMX "auto" is bfloat16 for matrix products with frozen weights, and for
    the in-process sampler, if adapters are trained on models of 16 million parameters or more; else float32. Before the
    first step and at each publication, sampler and learner are compared: above `probe_bound` a run with "auto" goes
    back to its last checkpoint and continues in float32, and a run with "bfloat16" stops. On a GPU what stays float32
    is multiplied in TF32."""

    lr: float | None = None
    """Learning rate of AdamW; default: 5e-6 for a LoRA, 1e-6 for all weights. This suits models of 1B parameters and
    more; a model of under a million parameters needs about a thousand times as much."""

    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw | adamw8bit: moments of 8 bits, 6 bytes less for each trained parameter; on a GPU, in one process."""

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""

    mini_batch: int = 64
    """Rows per optimizer step, at most. Rows of one conversation, else of one prompt, stay together where they
    fit in."""

    memory: str = ""
    """Memory that the learner's process may take in all ("6GiB"), on the GPU if it has one. Forward and backward passes
    are as large as fits into it. A row that does not fit by itself is an error. Without a value, the activations of a
    pass take a sixteenth of the machine's memory and at most 8192 tokens; on a GPU four fifths of the memory that is
    free when an update begins, and at most 65536 tokens. Gradients do not depend on the size of passes."""

    quantize: Literal["none", "4bit"] = "none"
    """4bit: the frozen base of adapters in four bits (QLoRA), on a GPU, in one process. The sampler keeps its own
    precision, and the gap between both grows."""

    # Not settings: a learner decides these by itself. Tests and benchmarks force them in a subclass.

    grad_clip: ClassVar[float] = 1.0
    """Largest L2 norm of a policy's gradient at one optimizer step, as in the published AT-GRPO recipe; 0 for no
    clipping."""
    micro_batch_tokens: ClassVar[int | Literal["auto"]] = "auto"
    """Tokens per forward and backward pass, at most (a single longer row goes alone): distinct ones, or padded ones if
    rows do not share. "auto": as many as fit, see `memory`, rounded down to one of a few numbers."""
    device: ClassVar[str] = "auto"
    """torch device. auto: the first GPU that CUDA_VISIBLE_DEVICES leaves, or the CPU if there is none."""
    threads: ClassVar[int | None] = None
    """CPU threads of torch. Without a value one if all models are small, else torch's own number."""
    shared_prompts: ClassVar[bool] = True
    """Compute what rows have in common once: gradients are the same, and it takes less time and memory. Models whose
    layers are not all full attention compute each row whole."""
    activation_checkpointing: ClassVar[bool | Literal["auto"]] = "auto"
    """Recompute each layer in the backward pass, in optimizer steps with a row that would not fit otherwise, or where
    small passes would compute a third more. It takes a fraction of the memory and a third more time."""
    tree_attention: ClassVar[Literal["auto", "blocks", "flex"]] = "auto"
    """blocks: a few calls of SDPA with masks. flex: FlexAttention, which computes the same by one kernel. auto: blocks
    on a CPU; on a GPU the faster one, by a trial before the first update."""

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers outside their bounds, and for a memory that is no size."""
        check_bounds(self, "mini_batch", least=1, table="learner.")
        check_bounds(self, "lr", table="learner.")
        if self.memory:
            try:
                parse_size(self.memory)
            except ValueError:
                fault = "is not a size such as 6GiB or 800MB"
                raise ConfigError("learner.memory", self.memory, fault) from None

    @property
    def needing_gpu(self) -> dict[str, tuple[str, str]]:
        """By name, the settings that need a GPU: the value, and the one that needs none."""
        values = {name: (getattr(self, name), usual) for name, usual in _WITHOUT_GPU.items()}
        return {name: (value, usual) for name, (value, usual) in values.items() if value != usual}

    @property
    def precision(self) -> str:
        """`dtype`, and float32 for an "auto" that no run has decided by comparing with its sampler."""
        return "float32" if self.dtype == "auto" else self.dtype


_WITHOUT_GPU = {"optimizer": "adamw", "quantize": "none"}
"""Settings whose other values need a GPU."""
