"""The configuration of a training run: every setting once, as a TOML file and run.json hold it.

Unknown names are passed over here; `cotune.trainer.config` refuses them, and checks what needs an engine or a tracker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os.path import normpath
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotune.config.cluster import ClusterConfig
from cotune.config.learner import LearnerSettings, ScheduleConfig
from cotune.config.methods import LossSettings, RewardSettings, changed_settings
from cotune.config.policy import EvaluationSampling, LoraSettings, PolicyConfig
from cotune.config.records import LEARN_FROM_RECORDS, DistillConfig, RecordsConfig
from cotune.config.rollouts import (
    CurriculumConfig,
    PlanConfig,
    RefillConfig,
    ReplayConfig,
    RoutingConfig,
    SamplingConfig,
)
from cotune.errors import ConfigError, check_bounds
from cotune.records.plans import Plan
from cotune.records.policies import OtherRoles, Policies, PolicySpec
from cotune.records.step_ranges import within

Layout = Literal["shared", "lora", "full"]
Tool = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""Experiment trackers."""
STEPS_AHEAD = 1
"""How far rollouts may be ahead of training in mode async. With one step, the shorter of rollout and update is hidden
behind the longer one. With more, samples only become older."""
NO_TASKS = "none"
"""`evaluation.tasks` of a run that holds no task out."""


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[evaluation] Held-out tasks within the run: single samples, nothing is selected."""

    tasks: str = ""
    """JSON-lines file of held-out tasks | none. Without this setting, a run with 48 tasks or more holds out a third of
    them, 51 at most, and never trains on these."""
    every: int = 10
    """Steps between evaluations; there is one before the first step and one after the last too."""
    keep_best: bool = False
    """Also keep the checkpoint of the best evaluation, by `success`, or where that is not known by what each policy is
    trained on; `cotune export --step best` takes it."""
    patience: int | None = None
    """End the run after so many evaluations without a better one."""

    def __post_init__(self) -> None:
        check_bounds(self, "every", "patience", table="evaluation.")
        if self.tasks == NO_TASKS and (name := self.needing_tasks):
            fault = f"has no effect with evaluation.tasks = {NO_TASKS!r}"
            raise ConfigError(f"evaluation.{name}", getattr(self, name), fault, "Pass --eval-tasks FILE.")

    @property
    def needing_tasks(self) -> str:
        """The first field that is set and has no effect without held-out tasks; empty if there is none."""
        return next((name for name in ("keep_best", "patience") if getattr(self, name)), "")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A training run. Every field has a default; training needs `model`."""

    model: str = ""
    """Folder, GGUF file or Hugging Face id of the base model."""
    other_roles: OtherRoles = "frozen"
    """What plays a role that has no policy, in training, evaluation and the export alike: frozen (the untrained model)
    | provider (what the application uses today). Such calls are counted and shown."""
    tool_format: str = "auto"
    """How the model writes tool calls: auto (as its chat template does) | hermes | qwen3_coder | mistral |
    mistral_v11 | llama3_json | vllm:NAME (a tool parser of vLLM)."""
    recipe: str | None = None
    """at_grpo | dr_mas | c3 | c3_branches | grpo | dr_grpo | rloo | gspo | dapo | cispo | a published system | a class
    of your own, as my_method.py:Ranked; see docs/reference/recipes.md. Without a value: at_grpo under a tree plan,
    dr_mas under independent rollouts, c3_branches under a replay plan. sft | dpo | sweet_rl learn from records, see
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
    policies: Layout = "lora"
    """shared: one adapter for all roles | lora: one adapter per role | full: one model per role."""
    policy: tuple[PolicyConfig, ...] = ()
    """[[policy]] tables, instead of a layout."""
    roles: tuple[str, ...] = ()
    """Roles that the application has but shows only on some tasks."""
    roles_by: str = ""
    """module:function or file.py:function that names the role of each call from its messages, model, tools and caller |
    caller: the name of the application's function that makes it | model: the name of the model that it asks; see
    docs/how-to/roles.md."""
    prompts_file: str = ""
    """File of edited prompts, or a folder that has one: calls go out with them; see docs/how-to/prompts.md. The run
    keeps a copy as prompts.json."""
    init: str = ""
    """Run or export whose policies this run starts from, instead of the untrained model; see
    docs/how-to/distillation.md."""
    tasks_per_step: int = 32
    """Tasks of a step; recorded episodes if the run learns from records."""
    concurrency: int = 64
    """Episodes in flight."""
    episode_timeout: float = 600.0
    """Seconds until an episode fails. An answer of a model may take half of them."""
    max_calls: int | None = None
    """Calls after which an episode fails, as a failure of the policy; without a value four times the most that an
    episode made before the first step, at least 256."""
    mode: Literal["sync", "async"] = "sync"
    """sync: roll out, then train | async: the next step is rolled out while this one trains, so its samples are one
    version behind the policy that trains on them."""
    keep_token_ids: bool = False
    """Store the token ids of redacted messages. Training on them needs these, and they can be read as text."""
    seed: int = 0
    """Decides the order of tasks and of rows, the adapters' initial weights, and, with the place of a call and the
    application's own seed if it sets one, the seed of each call."""
    loggers: tuple[Tool, ...] = ()
    """Experiment trackers that get each step: tensorboard | wandb | mlflow | trackio; see
    docs/how-to/loggers.md."""
    project: str = "cotune"
    """The trackers' project or experiment; the run has the name of its folder there."""
    checkpoint_every: int = 1
    """Steps between checkpoints; Ctrl-C saves one too."""
    engine: str = "auto"
    """What samples: auto | vllm | transformers (in process) | the address of a vLLM server that runs already, such as
    http://10.0.0.5:8000 (with several base models one for each, separated by commas; the key is read from
    VLLM_API_KEY) | module:function (an async function that opens a `Sampler` of your own, called with model and
    engine_args). auto is vllm on GPUs and on Ray if it is installed and knows the model, else transformers; see
    docs/how-to/gpu.md."""
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """[engine_args] Further arguments of vLLM's engine, such as max_model_len or gpu_memory_utilization; of a server:
    folder, where adapters are written for one on another machine."""
    probe_bound: float = 0.05
    """Largest mean gap between sampler and learner log-probabilities after a publish, in nats."""
    guard: Literal["off", "warn", "stop"] = "warn"
    """If training has collapsed: warn, or end the run. Both keep the checkpoint of the best steps and print how to go
    back to it; see docs/how-to/figures.md."""
    rewards: RewardSettings = RewardSettings()
    loss: LossSettings = LossSettings()
    lora: LoraSettings = LoraSettings()
    plan: PlanConfig = PlanConfig()
    replay: ReplayConfig = ReplayConfig()
    sampling: SamplingConfig = SamplingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    routing: RoutingConfig = RoutingConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    refill: RefillConfig = RefillConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    learner: LearnerSettings = LearnerSettings()
    cluster: ClusterConfig = ClusterConfig()
    records: RecordsConfig = RecordsConfig()
    distill: DistillConfig = DistillConfig()

    def __post_init__(self) -> None:
        counts = ("steps", "tasks_per_step", "concurrency", "checkpoint_every")
        check_bounds(self, *counts, "episode_timeout", "max_calls", "probe_bound")

    @property
    def from_records(self) -> bool:
        """Whether the run learns from records, without rollouts."""
        return self.recipe in LEARN_FROM_RECORDS

    @property
    def specs(self) -> dict[str, PolicySpec]:
        """The policies of the [[policy]] tables, by name. A policy with the run's model has the model None."""
        # Paths of one model may be spelled differently. With one spelling for all policies, it is loaded once.
        spelling_of_model = first_written([self.model, *(policy.model for policy in self.policy if policy.model)])
        specs: dict[str, PolicySpec] = {}
        for policy in self.policy:
            model = spelling_of_model[policy.model or self.model]
            own_model = None if model == self.model else model
            spec = PolicySpec(name=policy.name, kind=policy.kind, lora=policy.lora.spec, model=own_model)
            specs[policy.name] = spec
        return specs

    @property
    def bases(self) -> dict[str, list[str]]:
        """The base models, the run's own first, and the policies of each that [[policy]] tables name."""
        return Policies(self.specs, {}).bases(self.model)

    @property
    def tool_formats(self) -> dict[str, str]:
        """How each base model writes tool calls."""
        set_by_policies: dict[str | None, str] = {}
        for policy in self.policy:
            if policy.tool_format:
                set_by_policies[self.specs[policy.name].model] = policy.tool_format
        return {model: set_by_policies.get(model, self.tool_format) for model in self.bases}

    @property
    def settings_for_rollouts(self) -> list[str]:
        """The names of the settings that the user has set and that have an effect only in runs with rollouts."""
        # `changed_settings` compares both tables with their defaults. A default table leaves the changes of the other.
        changed_in_loss = changed_settings(RewardSettings(), self.loss)
        changed_in_rewards = changed_settings(self.rewards, LossSettings())
        # The first field of [evaluation] that is set and needs held-out tasks, which only rollouts evaluate.
        field_needing_tasks = self.evaluation.needing_tasks
        is_set = {
            "loss": bool(changed_in_loss),
            "rewards": bool(changed_in_rewards),
            "plan.kind": bool(self.plan.kind),
            "evaluation.tasks": self.evaluation.tasks not in ("", NO_TASKS),
            f"evaluation.{field_needing_tasks}": bool(field_needing_tasks),
            "guard": self.guard == "stop",
            "curriculum.pool": self.curriculum.pool != "even",
            "refill.budget": bool(self.refill.budget),
        }
        return [name for name, was_set in is_set.items() if was_set]

    @property
    def episodes_at_once(self) -> int:
        """Episodes in flight."""
        return 1 if self.sampling.repeatable else self.concurrency

    @property
    def request_timeout(self) -> float:
        """Seconds until a request to a model fails: half of an episode, so that the application can still ask again."""
        return self.episode_timeout / 2

    @property
    def ahead(self) -> int:
        """How many steps rollouts may be ahead of training."""
        return STEPS_AHEAD if self.mode == "async" else 0

    @property
    def named_roles(self) -> dict[str, str]:
        """The policy of each role that a [[policy]] table names."""
        return {role: policy.name for policy in self.policy for role in policy.roles}

    @property
    def largest_k(self) -> int:
        """The largest number of candidates of a call, over all policies."""
        return max([self.plan.k, *(policy.k for policy in self.policy if policy.k is not None)])

    def plans_of(self, plan: Plan, policies: Mapping[str, str]) -> dict[str, Plan]:
        """The plan of each role whose policy has its own number of candidates (`k`) or its own way to select the answer
        among them. `policies` has the policy of each role."""
        plans: dict[str, Plan] = {}
        for role, name in policies.items():
            policy_table = self.policy_table(name)
            if policy_table is None:
                continue
            changes: dict[str, Any] = {}
            if policy_table.k is not None:
                changes["k"] = policy_table.k
            if policy_table.select is not None:
                changes["select"] = policy_table.select
            if changes:
                plans[role] = msgspec.structs.replace(plan, **changes)
        return plans

    def own_sampling(self, policies: Mapping[str, str], *, evaluation: bool = False) -> dict[str, dict[str, Any]]:
        """The sampling parameters that the [[policy]] tables set, by role: the temperature, and in an evaluation also
        `top_p`, `top_k` and `min_p`. `policies` has the policy of each role."""
        params_of_role: dict[str, dict[str, Any]] = {}
        for role, name in policies.items():
            params: dict[str, Any] = {}
            if evaluation:
                params = self.evaluation_sampling(name)
            policy_table = self.policy_table(name)
            if policy_table is not None and policy_table.temperature is not None:
                params["temperature"] = policy_table.temperature
            if params:
                params_of_role[role] = params
        return params_of_role

    def evaluation_sampling(self, policy: str) -> dict[str, Any]:
        """The `top_p`, `top_k` and `min_p` of a policy in evaluations; values that exclude no token are left out."""
        policy_table = self.policy_table(policy)
        if policy_table is None:
            return {}
        default = EvaluationSampling()
        settings: dict[str, Any] = {}
        for name in EvaluationSampling.__struct_fields__:
            value = getattr(policy_table.evaluation, name)
            if value != getattr(default, name):
                settings[name] = value
        return settings

    def policy_table(self, name: str) -> PolicyConfig | None:
        """The [[policy]] table of a policy; None for a policy without a table."""
        return next((policy for policy in self.policy if policy.name == name), None)

    def tool_format_of(self, name: str) -> str:
        """How the base model of a policy writes tool calls."""
        table = self.policy_table(name)
        if table is None or not table.model:
            return self.tool_format
        # Policies with the same base model have one format, which any of them may set.
        for policy in self.policy:
            if policy.model and normpath(policy.model) == normpath(table.model) and policy.tool_format:
                return policy.tool_format
        return self.tool_format

    def trains(self, name: str, step: int) -> bool:
        """Whether a policy is trained in `step`, counted from 0."""
        policy_table = self.policy_table(name)
        return policy_table is None or within(policy_table.train, step)


def first_written(models: Iterable[str]) -> dict[str, str]:
    """Map each model to the first spelling of the same path in `models`, so that `./base` and `base` load once."""
    spelling_of_path: dict[Path | str, str] = {}
    spelling_of_model: dict[str, str] = {}
    for model in models:
        path = Path(model).expanduser()
        identity = path.resolve() if path.exists() else model  # an id of the hub is no path
        spelling_of_model[model] = spelling_of_path.setdefault(identity, model)
    return spelling_of_model
