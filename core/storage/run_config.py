"""The part of a run's configuration that is read outside training; `trainer.config` has all fields."""

from __future__ import annotations

from os.path import normpath
from typing import Literal

import msgspec

from cotune.config.methods import LossSettings, RewardSettings
from cotune.records.plans import PlanKind
from cotune.records.policies import TRAINED, OtherRoles, PolicyKind
from cotune.records.step_ranges import within
from cotune.storage.outcomes import failure_reward


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """[plan]"""

    kind: PlanKind | None = None
    """tree | independent | replay (see docs/how-to/replay.md); without a value: replay for recipes c3 and
    c3_branches, tree when the workflow has scorers and the recipe takes it, else independent."""


class RunLearner(msgspec.Struct, frozen=True, kw_only=True):
    """[learner]"""

    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Precision of the forward pass. Trained weights, optimizer states and logits are float32 in any case. "auto" is
    bfloat16 on a GPU that multiplies it (NVIDIA: Ampere and later), for frozen weights and matrix products, and float32
    on other GPUs. On a CPU with AVX512-BF16 or AMX "auto" is bfloat16 for matrix products with frozen weights, and for
    the in-process sampler, if adapters are trained on models of 16 million parameters or more; else float32. Before the
    first step and at each publication, sampler and learner are compared: above `probe_bound` a run with "auto" goes
    back to its last checkpoint and continues in float32, and a run with "bfloat16" stops. On a GPU what stays float32
    is multiplied in TF32."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""


class RunReplay(msgspec.Struct, frozen=True, kw_only=True):
    """[replay]"""

    forks: str = "all"
    """all | first:N (the first N calls) | every:N (each Nth) | entropy:N (the N whose answers have the highest
    mean -log p per token) | role:NAME (all calls of a role). Only calls of trained roles count."""


class RunRouting(msgspec.Struct, frozen=True, kw_only=True):
    """[routing]"""

    swap: tuple[str, ...] = ()
    """Two or more roles that pass their policies around in a ring (CORY)."""
    swap_every: int = 5
    """Steps between two swaps."""


class RunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """[records]"""

    path: str = ""
    """Run folder or records file to learn from, with recipe sft or dpo."""
    app: str = ""
    """Learn only from the episodes of this application."""


class RunDistill(msgspec.Struct, frozen=True, kw_only=True):
    """[distill]"""

    teacher: str = ""
    """A model with the tokenizer of the run's own: folder or Hugging Face id, loaded next to the learner, or
    the address of a vLLM server, such as http://10.0.0.5:8000. The server's key is read from VLLM_API_KEY."""


class RunPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """[[policy]]"""

    name: str
    """Its name in records, metrics and the export."""
    roles: tuple[str, ...]
    """The roles that it plays."""
    kind: PolicyKind = "lora"
    """lora | full | frozen (its base, untrained) | provider (whatever the application uses today)."""
    model: str = ""
    """Folder, GGUF file or Hugging Face id of its base model; without a value the run's `model`."""
    tool_format: str = ""
    """How that base model writes tool calls, for all policies that have it; without a value the run's `tool_format`."""
    recipe: str | None = None
    """A recipe of its own, with the run's plan and without the run's [rewards] and [loss]; without a value the run's.
    Policies with one recipe are compared together, others by themselves."""
    rewards: RewardSettings = RewardSettings()
    """Settings of [rewards] for this policy, in addition to the run's if it has the run's recipe."""
    loss: LossSettings = LossSettings()
    """Settings of [loss] for this policy, in addition to the run's if it has the run's recipe."""
    weight_decay: float | None = None
    """Without a value `learner.weight_decay`."""
    teacher: str = ""
    """Its teacher with recipe distill, as `distill.teacher`, which it is without a value."""
    train: str = ""
    """Steps in which it is trained, as ranges that count from 1, both ends included: 1:20,40: (without a value all). In
    the other steps its roles are sampled as they are, and their candidates are counted as `frozen_step`; its
    optimizer's state stays, and its schedule goes on with the run's steps. A resumed run may change it for steps to
    come."""

    @property
    def trained(self) -> bool:
        return self.kind in TRAINED


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The base of `TrainConfig`: the same fields with the same defaults. Unknown fields are passed over."""

    other_roles: OtherRoles = "frozen"
    """What plays a role that has no policy, in training, evaluation and the export alike: frozen (the untrained model)
    | provider (what the application uses today). Such calls are counted and shown."""
    tool_format: str = "auto"
    """How the model writes tool calls: auto (as its chat template does) | hermes | qwen3_coder | mistral |
    mistral_v11 | llama3_json | vllm:NAME (a tool parser of vLLM)."""
    recipe: str | None = None
    """at_grpo | dr_mas | c3 | c3_branches | grpo | dr_grpo | rloo | gspo | dapo | cispo | a published system | a class
    of your own, as my_method.py:Ranked; see docs/reference/recipes.md. Without a value: at_grpo under a tree plan,
    dr_mas under independent rollouts, c3_branches under a replay plan. sft | dpo learn from records, see
    docs/how-to/distillation.md."""
    steps: int = 100
    """Training steps."""
    on_failure: str = "lowest"
    """The reward, after weights and gates, of an episode that the policy failed (bad output, prompt too long, too many
    calls, its time-out): lowest (the role's lowest in the step, and at most 0) | reward:<number> | exclude (it teaches
    nothing). An episode that the infrastructure failed has none."""
    redact: str = ""
    """module:function or file.py:function that gets each message before it is stored and returns what to store, in
    addition to the workflow's own redactors; see docs/how-to/privacy.md."""
    prices: dict[str, tuple[float, float]] = {}
    """[prices] Money for a million prompt tokens and a million completion tokens, by model or policy, for the costs
    that cotune eval shows."""
    rewards: RewardSettings = RewardSettings()
    loss: LossSettings = LossSettings()
    plan: RunPlan = RunPlan()
    replay: RunReplay = RunReplay()
    routing: RunRouting = RunRouting()
    learner: RunLearner = RunLearner()
    records: RunRecords = RunRecords()
    distill: RunDistill = RunDistill()
    policy: tuple[RunPolicy, ...] = ()
    """[[policy]] tables, instead of a layout."""

    def __post_init__(self) -> None:
        failure_reward(self.on_failure)

    def own_of(self, name: str) -> RunPolicy | None:
        """The [[policy]] table of a policy; None where it has none."""
        return next((one for one in self.policy if one.name == name), None)

    def tool_format_of(self, name: str) -> str:
        """How the base model of a policy writes tool calls."""
        own = self.own_of(name)
        if own is None or not own.model:
            return self.tool_format
        same = (one.tool_format for one in self.policy if one.model and normpath(one.model) == normpath(own.model))
        return next(filter(None, same), self.tool_format)

    def decay_of(self, name: str) -> float:
        """The weight decay of a policy."""
        own = self.own_of(name)
        return self.learner.weight_decay if own is None or own.weight_decay is None else own.weight_decay

    def trains(self, name: str, step: int) -> bool:
        """Whether a policy is trained in `step`, counted from 0."""
        own = self.own_of(name)
        return own is None or within(own.train, step)
