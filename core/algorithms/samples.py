"""Samples: one row per candidate, as filters, advantages and the learner see it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from operator import attrgetter
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.records.structs import PolicyRef

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Failure = float | Literal["lowest"]
"""The reward of a failed episode, after weights and gates: a number, or the lowest of the step and 0."""

KEY_FIELDS = ("task", "rollout", "role", "turn", "step", "branch", "prompt", "observation", "policy")
"""Fields of a sample that a recipe may group by."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate with everything that a recipe may group, weigh or normalise by.

    `prompt` is the segment id of the prompt path, with the ids of its images: equal ids mean identical prompt token ids
    and images. `branch` names the
    history the call happened in: under a tree plan the episode, whose chosen prefix all siblings share; under a replay
    plan the call that was forked, whose `turn` all siblings have; under independent rollouts the prompt, as equal
    prompts are all that two episodes can have in common.
    `observation` is what the role saw last: the id of the prompt's last message, its anchor state (GiGPO).
    `entropy` is the mean of -log pi_sampler over the tokens, in nats, as estimate of the mean token entropy.
    `rollout` is the episode. `rewards` are the candidate's own components, from before the selection; `outcome`
    the episode's. `failure` stands for the outcome of an episode that the policy failed (`reward_failures`); it is None
    where the episode ended well. `limit` is the most tokens that the answer could have, None where unknown; `truncated`
    says that it was cut there, `timed_out` that a call of a trained role timed out in its episode. `continues` marks a
    call that a branch of a replay plan makes after its fork: it is in no group, and has the advantage of the branch's
    candidate.
    """

    id: str
    task: str
    rollout: str
    role: str
    turn: int
    step: int
    branch: str
    prompt: str
    policy: PolicyRef
    tokens: int
    observation: str = ""
    entropy: float = 0.0
    rewards: Mapping[str, float] = {}
    outcome: Mapping[str, float] = {}
    failure: Failure | None = None
    chosen: bool = True
    training_step: int | None = None
    limit: int | None = None
    truncated: bool = False
    timed_out: bool = False
    continues: bool = False

    @property
    def call(self) -> str:
        """Id of the call that this candidate answers."""
        return self.id.rpartition(".")[0]


def codes(values: Sequence[Hashable]) -> tuple[Codes, list[Hashable]]:
    """Number equal values alike, in order of first appearance. Returns ([n] numbers, the distinct values)."""
    index: dict[Hashable, int] = {}
    numbers = [index.setdefault(value, len(index)) for value in values]
    return np.array(numbers, dtype=np.int64), list(index)


def keys(samples: Sequence[Sample], fields: tuple[str, ...]) -> list[Hashable]:
    """The values of `fields` of each sample, as tuples; of a policy its name, whatever its version."""
    if not fields:
        return [()] * len(samples)
    get = attrgetter(*("policy.name" if field == "policy" else field for field in fields))
    return [(get(s),) for s in samples] if len(fields) == 1 else [get(s) for s in samples]


class TrainRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner needs of one candidate. `logprobs` are the sampler's, in nats, one per response token.

    `temperature`, `grammar` and `logit_bias` shape the distribution that it was drawn from (`SamplingParams`).
    `loss_mask`, one per response token, is false for tokens that do not count: they carry no gradient and are in no
    denominator and no metric. Empty: all count. `reference` is a teacher's log-probability of each response token.
    `trajectory` names what the row is a part of: its episode. `exploration` multiplies the weight of the entropy bonus.
    Under a critic `advantage` is the reward, and `privileged` are token ids that it reads before the prompt. `hinted`
    are those of the prompt that a teacher reads in place of the policy's, empty for the same one. `images` are the
    encoded bytes of the prompt's images, in order.
    """

    id: str
    role: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    temperature: float = 1.0
    grammar: str = ""
    logit_bias: tuple[tuple[int, float], ...] = ()
    version: int = 0
    loss_mask: tuple[bool, ...] = ()
    reference: tuple[float, ...] = ()
    trajectory: str = ""
    exploration: float = 1.0
    privileged: tuple[int, ...] = ()
    hinted: tuple[int, ...] = ()
    images: tuple[bytes, ...] = ()
