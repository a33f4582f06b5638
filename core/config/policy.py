"""The [[policy]] tables: what differs for single policies."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cotune.config.learner import ScheduleConfig
from cotune.config.methods import LossSettings, RewardSettings
from cotune.errors import ConfigError, check_bounds
from cotune.records.plans import Select
from cotune.records.policies import ALL_LINEAR, TRAINED, LoraSpec, PolicyKind


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True):
    """[lora] Shape of a LoRA adapter: W + 2 * B A on each target module."""

    rank: int = 16
    """Rows of A and columns of B."""
    targets: tuple[str, ...] = ALL_LINEAR
    """Names of the linear layers that get an adapter."""

    def __post_init__(self) -> None:
        check_bounds(self, "rank", table="lora.")

    @property
    def spec(self) -> LoraSpec:
        """The shape as adapters are stored. alpha is twice the rank, so that the learning rate suits every rank."""
        return LoraSpec(rank=self.rank, alpha=2.0 * self.rank, targets=self.targets)


class EvaluationSampling(msgspec.Struct, frozen=True, kw_only=True):
    """[policy.evaluation] Unlikely tokens that the roles of one policy never draw in evaluations. In training the whole
    distribution is sampled: what these settings cut away depends on the weights that are trained."""

    top_p: float = 1.0
    """Draw from the likeliest tokens that have this share of the probability together; above 0, and at most 1 (all
    tokens)."""
    top_k: int = 0
    """Draw from this number of the likeliest tokens; 0: from all."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest token's probability; 0: from all."""

    def __post_init__(self) -> None:
        check_bounds(self, "top_p", table="policy.evaluation.")
        check_bounds(self, "top_k", "min_p", least=0, table="policy.evaluation.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value > 1.0:
                raise ConfigError(f"policy.evaluation.{name}", value, "must be at most 1")


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[[policy]] One policy and the roles it plays; replaces the layout in `policies`."""

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
    k: int | None = None
    """Candidates per call (tree) or per forked call (replay) of its roles; without a value `plan.k`. Independent
    rollouts repeat whole episodes, which all policies share."""
    temperature: float | None = None
    """At which its roles are sampled in training, whatever the application asks for; without a value
    `sampling.temperature`."""
    select: Select | None = None
    """Which of its candidates the application gets, under a tree plan: argmax | sample | first; without a value
    `plan.select`."""
    evaluation: EvaluationSampling = EvaluationSampling()
    """Settings of sampling that only hold in evaluations."""
    teacher: str = ""
    """Its teacher with recipe distill, as `distill.teacher`, which it is without a value."""
    train: str = ""
    """Steps in which it is trained, as ranges that count from 1, both ends included: 1:20,40: (without a value all). In
    the other steps its roles are sampled as they are, and their candidates are counted as `frozen_step`; its
    optimizer's state stays, and its schedule goes on with the run's steps. A resumed run may change it for steps to
    come."""
    lora: LoraSettings = LoraSettings()
    lr: float | None = None
    """Without a value `learner.lr`."""
    schedule: ScheduleConfig | None = None
    """Without a value the run's `schedule`."""

    def __post_init__(self) -> None:
        check_bounds(self, "lr", "temperature", table="policy.")
        if self.k is not None and self.k < 2:
            fault = f"of policy {self.name} must be 2 or more: a group of one has nothing to compare"
            raise ConfigError("policy.k", self.k, fault, 'To leave the policy as it is, set kind = "frozen".')

    @property
    def of_training(self) -> Iterator[str]:
        """The settings in this table that have an effect only if the policy is trained."""
        for name in ("lr", "schedule", "recipe", "rewards", "loss", "train", "teacher"):
            if getattr(self, name) not in UNSET:
                yield name

    @property
    def trained(self) -> bool:
        return self.kind in TRAINED


UNSET = (None, "", RewardSettings(), LossSettings(), EvaluationSampling())
"""Values of fields that a [[policy]] table does not set."""
