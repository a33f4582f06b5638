"""The options of an evaluation and its modes: who plays in each, how calls are sampled, which modes are compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from cotune.adapters.bases import Moved
from cotune.errors import ConfigError, check_bounds
from cotune.prompts.edits import Prompts
from cotune.records.prices import Prices
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import at_temperature

Mode = Literal["base", "trained", "swapped", "today"]
MODES: tuple[Mode, ...] = get_args(Mode)
DEFAULT_MODES: tuple[Mode, ...] = ("base", "trained", "swapped")
"""The default modes: all except `today`, which asks a provider and costs money."""

REMOVED_MODES = {
    "base_greedy": "Use the mode base with --temperature 0.",
    "greedy": "Use the mode trained with --temperature 0.",
    "base_as_deployed": "Use the mode base with --temperature app.",
    "as_deployed": "Use the mode trained with --temperature app.",
    "as_written": "Use the mode today: the application's present model with its own prompts.",
}
"""Removed modes, each with its replacement."""

OPPONENTS: tuple[tuple[Mode, tuple[Mode, ...]], ...] = (
    ("trained", ("base",)),
    ("swapped", ("trained", "base")),
    ("trained", ("today",)),
)
"""The comparisons between the modes of a run, in the form of `Contest.opponents`."""

Temperature = float | Literal["app"]
"""A temperature of all calls, or `app`: each call is sampled as the application asks, top-p and top-k included."""
TRAINING_TEMPERATURE = 1.0
"""The default temperature of training, and so of evaluations."""


class EvaluationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an evaluation is run. Raises ConfigError for an unknown mode, and for limits below their minimum."""

    modes: Sequence[str] | None = None
    """Each runs every task once; see docs/how-to/evaluation.md. Without a value: base, trained and swapped; with
    `bases`, only base."""
    bases: Sequence[str | Path] = ()
    """Folders or Hugging Face ids of models that are evaluated untrained, in place of a run or an export. Each plays
    every role."""
    pairs: bool = False
    """Evaluate all assignments of the `bases` to the roles of the application."""
    max_episodes: int = 1000
    """With `pairs`: the most episodes, over all assignments. If they take more, nothing is evaluated."""
    against: str | Path | None = None
    """Another run, export or model, that the run is compared with in place of the modes, on the same tasks."""
    samples: int = 1
    """Episodes of each task in every mode: pass@k for k up to this number. At temperature 0 only the first one is
    run."""
    temperature: Temperature | None = None
    """Sampling temperature of all modes except `today`, or `app`: as the application asks. Without a value: `app` if
    `today` is one of the modes, so that all sample alike; otherwise 1, as in training."""
    model: Moved = None
    """Folder or id of the base model, if it is elsewhere than the run or export says; with several base models, a
    mapping of the moved ones."""
    max_tokens: int | None = None
    """Most tokens of an answer if the application sets no limit. Without a value: as in training, 256 for an export,
    and at the temperature `app` the model's context, as in `deployed`."""
    concurrency: int = 64
    """Episodes in flight."""
    timeout: float | None = None
    """Seconds for one episode; one that takes longer has failed. Without a value: as in training, 600 for an export."""
    seed: int = 0
    """A call at the same place draws the same random numbers in every mode."""
    threads: int | None = None
    """CPU threads of the sampler; without a value one for each core, or one for a model of less than 16 million
    parameters."""
    out: str | Path | None = None
    """New folder for the records and evaluation.json; without a value RUN/eval, or RUN/eval-2, ... after it. The
    evaluation of an export is only stored with this option."""
    prices: Prices = {}
    """Money for a million prompt tokens and a million completion tokens, by policy or by model. The price of a run's
    base model also holds for its policies without a price. These prices override the ones of the run's
    configuration."""
    records: str | Path | None = None
    """Run folder or records file of the application with its provider, to be shown and compared with the modes."""
    roles_by: str | None = None
    """How roles are named: caller | model | module:function; without a value: as in the run."""
    prompts: Prompts | str | Path | None = None
    """File of edited prompts for the calls of all modes, or a folder that has one; without a value: the edited prompts
    of the run or export."""

    def __post_init__(self) -> None:
        """Check values and their combinations. Raises ConfigError."""
        if self.modes is not None:
            check_modes(self.modes)
        check_bounds(self, "samples", "timeout", "concurrency", "max_episodes")
        if self.pairs and len(self.bases) < 2:
            remedy = "Name two or three: --base A --base B --pairs."
            raise ConfigError("pairs", True, "needs two base models or more", remedy)
        check_temperature(self.temperature)


@dataclass(frozen=True)
class OtherPlayers:
    """Who plays the roles that a lineup has no policy for: `player`, or the application's own provider if that is None.

    The provider always plays `provider_roles`. If `by_intent` is set, the report has no note on roles without a policy.
    """

    player: PolicyRef | None
    provider_roles: Collection[str] = ()
    by_intent: bool = False


@dataclass(frozen=True)
class Lineup:
    """Who plays each role (None: the application's own provider plays all), and the temperature.

    Without `others` the roles that `policies` does not name are played as the run was configured (`other_roles`).
    """

    policies: Mapping[str, PolicyRef] | None
    temperature: Temperature
    others: OtherPlayers | None = None

    @property
    def override(self) -> dict[str, float] | None:
        """The temperature, and all other settings of the distribution, which replace the application's own."""
        return None if self.temperature == "app" else at_temperature(self.temperature)


def check_modes(modes: Sequence[str]) -> tuple[Mode, ...]:
    """Return the modes without repeats. Raises ConfigError for an unknown mode, or without any."""
    for mode in modes:
        if mode in REMOVED_MODES:
            raise ConfigError("modes", mode, "was removed", REMOVED_MODES[mode])
        if mode not in MODES:
            raise ConfigError("modes", mode, f"is not one of {', '.join(MODES)}")
    if not modes:
        raise ConfigError("modes", None, "is missing", f"Choose from {', '.join(MODES)}.")
    return tuple(dict.fromkeys(modes))  # type: ignore[arg-type]


def modes_of(models_only: bool, options: EvaluationOptions) -> tuple[Mode, ...]:
    """Return the modes of an evaluation: the requested ones, or the default for a run or an export, or for untrained
    models alone (`models_only`). Raises ConfigError for an unknown mode."""
    if options.modes is not None:
        return check_modes(options.modes)
    if options.against is not None:
        return ()
    return ("base",) if models_only else DEFAULT_MODES


def check_temperature(temperature: Temperature | None) -> None:
    """Raise ConfigError for a temperature that is neither a finite number of 0 or more, nor `app`."""
    if temperature is None or temperature == "app":
        return
    if isinstance(temperature, str) or not 0.0 <= temperature < math.inf:
        raise ConfigError("temperature", temperature, "must be a number of 0 or more, or app")


def temperature_of(modes: Collection[str], requested: Temperature | None) -> Temperature:
    """Return the temperature of an evaluation's modes: the requested one, or the default for these modes."""
    if requested is not None:
        return requested
    return "app" if "today" in modes else TRAINING_TEMPERATURE


def swap(roles: Mapping[str, PolicyRef], trained: Collection[str]) -> dict[str, PolicyRef] | None:
    """Return who plays each role if the trained policies are swapped in a circle; None with fewer than two of them.

    Each trained policy gives its roles to the next one, in the order of roles, and the last one to the first. `trained`
    are the names of these policies. Roles that other policies play do not change.
    """
    policies = list(dict.fromkeys(ref for ref in roles.values() if ref.name in trained))
    if len(policies) < 2:
        return None
    next_policy = dict(zip(policies, policies[1:] + policies[:1], strict=True))
    return {role: next_policy.get(ref, ref) for role, ref in roles.items()}


@dataclass(frozen=True)
class Contest:
    """The lineups of an evaluation by label, in the order in which they play, and the comparisons between them.

    `opponents` has a label and its possible opponents: it is compared with the first of them in which not every episode
    failed. `candidates` are the labels that are compared with recorded episodes. `notes` name lineups that are not
    played, with the reason. `own_sampling` has settings of sampling (`top_p`, ...) by policy, for its roles in all
    lineups whose temperature is a number.
    """

    lineups: Mapping[str, Lineup]
    opponents: Sequence[tuple[str, Sequence[str]]]
    candidates: Sequence[str]
    notes: Sequence[str] = ()
    own_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def sampling_of_roles(self, lineup: Lineup) -> dict[str, Mapping[str, Any]]:
        """The settings of sampling of the roles whose policy in a lineup has its own."""
        settings: dict[str, Mapping[str, Any]] = {}
        for role, policy in (lineup.policies or {}).items():
            if policy.name in self.own_sampling:
                settings[role] = self.own_sampling[policy.name]
        return settings

    def pairs(self, sound: Collection[str]) -> list[tuple[str, str]]:
        """Return the comparisons of lineups that are in `sound`: not every episode of them failed."""
        compared = []
        for label, opponents in self.opponents:
            opponent = next((name for name in opponents if name in sound), None)
            if label in sound and opponent is not None:
                compared.append((label, opponent))
        return compared


def contest_of_run(
    roles: Mapping[str, PolicyRef], trained: Collection[str], modes: Sequence[Mode], temperature: Temperature
) -> Contest:
    """Return the modes of a run or an export. `roles` has the newest version for each role, `trained` the names of the
    policies that have weights."""
    untrained = {role: PolicyRef(ref.name, version=0) for role, ref in roles.items()}
    swapped = swap(roles, trained)
    lineups: dict[str, Lineup] = {}
    notes: list[str] = []
    for mode in modes:
        if mode == "today":
            lineups[mode] = Lineup(policies=None, temperature="app")
        elif mode == "base":
            lineups[mode] = Lineup(untrained, temperature)
        elif mode == "trained":
            lineups[mode] = Lineup(dict(roles), temperature)
        elif swapped is not None:
            lineups[mode] = Lineup(swapped, temperature)
        else:
            notes.append("swapped was not run: fewer than two trained policies play a role.")
    return Contest(lineups, OPPONENTS, candidates=["trained"], notes=[*notes, *_note_on_temperatures(lineups)])


@dataclass(frozen=True)
class Side:
    """A team that plays the same tasks as others: the policy of each role, and who plays all other roles."""

    policies: Mapping[str, PolicyRef]
    others: OtherPlayers


def model_side(name: str) -> Side:
    """Return a side with the untrained model of a policy in every role."""
    return Side({}, OtherPlayers(PolicyRef(name), by_intent=True))


def contest_of_sides(
    sides: Mapping[str, Side],
    opponents: Sequence[tuple[str, Sequence[str]]],
    modes: Collection[Mode],
    temperature: Temperature,
) -> Contest:
    """Compare sides (by label) with their `opponents`, and with `today` if that is one of the modes. Raises ConfigError
    for a mode that needs a single run."""
    for mode in modes:
        if mode != "today":
            fault = "needs a single run, export or team, and several sides are compared"
            raise ConfigError("modes", mode, fault, "Leave it out. Only today can be added.")
    lineups = {label: Lineup(side.policies, temperature, side.others) for label, side in sides.items()}
    compared = list(opponents)
    if "today" in modes:
        lineups["today"] = Lineup(policies=None, temperature="app")
        compared += [(label, ["today"]) for label in sides]
    return Contest(lineups, compared, list(sides), _note_on_temperatures(lineups))


def contest_of_models(models: Sequence[str], modes: Collection[Mode], temperature: Temperature) -> Contest:
    """Compare untrained models, by the names of their policies: each plays every role, and all are compared with the
    first one."""
    # All are compared with the first model, or with the next one if all episodes of the first failed.
    opponents = [(name, models[:index]) for index, name in enumerate(models) if index > 0]
    sides = {name: model_side(name) for name in models}
    return contest_of_sides(sides, opponents, [mode for mode in modes if mode != "base"], temperature)


def _note_on_temperatures(lineups: Mapping[str, Lineup]) -> list[str]:
    """Return a note if `today` is sampled at another temperature than the other modes."""
    temperature = next((lineup.temperature for label, lineup in lineups.items() if label != "today"), None)
    if "today" not in lineups or temperature is None or temperature == "app":
        return []
    return [
        f"today was sampled as the application asks, the other modes at temperature {temperature:g}: their "
        "difference is also a difference of temperatures. Use --temperature app to sample all alike."
    ]


def against_base(roles: Mapping[str, PolicyRef], role: str, seats: Collection[str]) -> dict[str, PolicyRef]:
    """Return the policies for `role` to play against the untrained model in all other `seats` of a game."""
    others = {name: PolicyRef(roles[name].name, version=0) for name in seats if name != role and name in roles}
    return {**roles, **others}
