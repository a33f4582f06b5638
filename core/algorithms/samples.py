"""Samples: one row per candidate, the input of filters, advantages and the learner."""

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
"""The reward of a failed episode, after weights and gates: a number, or the lowest reward of the step and at most 0."""

KEY_FIELDS = ("task", "rollout", "role", "turn", "step", "branch", "prompt", "observation", "policy")
"""Fields of a sample that a recipe may group by."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate with everything that a recipe may group, weigh or normalise by.

    `prompt` is the segment id of the prompt path, with the ids of its images: equal ids mean identical prompt token ids
    and images. `branch` identifies the history of the call: under a tree plan the episode, whose chosen prefix all
    siblings share; under a replay plan the forked call, whose `turn` all siblings have; under independent rollouts the
    prompt, as two episodes can have only equal prompts in common.
    `observation` is the id of the prompt's last message, its anchor state (GiGPO).
    `entropy` is the mean of -log pi_sampler over the tokens, in nats, as an estimate of the mean token entropy.
    `rollout` is the episode. `rewards` are the candidate's own components, from before the selection; `outcome` are the
    components of the episode. `failure` replaces the outcome of an episode that the policy failed (`reward_failures`);
    it is None if the episode ended well. `limit` is the maximum number of tokens of the answer, None if unknown;
    `truncated` says that it was cut there, `timed_out` that a call of a trained role timed out in its episode.
    `continues` marks a call that a branch of a replay plan makes after its fork: it has no group, and gets the
    advantage of the branch's candidate.
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
    """The values of `fields` of each sample, as tuples. For a policy it is the name, without the version."""
    if not fields:
        return [()] * len(samples)
    get = attrgetter(*("policy.name" if field == "policy" else field for field in fields))
    return [(get(s),) for s in samples] if len(fields) == 1 else [get(s) for s in samples]


class TrainRow(msgspec.Struct, frozen=True, kw_only=True):
    """The data of one candidate for a learner. `logprobs` are the sampler's, in nats, one per response token.

    `temperature`, `grammar` and `logit_bias` define the distribution that it was sampled from (`SamplingParams`).
    `loss_mask`, one per response token, is false for tokens that do not count: they have no gradient and are not in any
    denominator or metric. Empty: all count. `reference` is a teacher's log-probability of each response token.
    `trajectory` is the episode of the row. `exploration` multiplies the weight of the entropy bonus.
    Under a critic, `advantage` is the reward, and `privileged` are token ids that the critic reads before the prompt.
    `hinted` are the token ids of the prompt that a teacher reads instead of the policy's prompt, empty if both read the
    same. `images` are the encoded bytes of the prompt's images, in order.
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
