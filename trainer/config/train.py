"""The configuration of a training run: typed, documented per field, read from TOML, overridden by flags."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotune.algorithms.catalogue import RECIPES, is_own, recipe_class, takes_a_tree
from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.policy_recipes import Recipes, check_together
from cotune.algorithms.run_recipe import policy_recipes
from cotune.algorithms.trial import check_own
from cotune.config.methods import LossSettings, RewardSettings, changed_settings
from cotune.errors import ConfigError, check_bounds
from cotune.integrations.exchange.trackers.tracker import Tool
from cotune.integrations.models.chat.tool_formats import AUTO, check_tool_format
from cotune.integrations.models.engines import Engine, engine_of
from cotune.records.plans import Plan, PlanKind, Select
from cotune.records.policies import LoraSpec, Policies, PolicySpec, policies_for
from cotune.storage.outcomes import failure_reward
from cotune.storage.run_config import RunConfig, RunPlan
from cotune.trainer.config.cluster import ClusterConfig
from cotune.trainer.config.curriculum import CurriculumConfig
from cotune.trainer.config.engine import check_engine
from cotune.trainer.config.faults import PAGE, check_names, fault
from cotune.trainer.config.from_records import DistillConfig, DpoConfig, RecordsConfig, check_records
from cotune.trainer.config.learner import LearnerSettings, check_one_process
from cotune.trainer.config.policy import PolicyConfig, PolicySettings, ScheduleConfig, check_policies, first_written
from cotune.trainer.config.refill import RefillConfig
from cotune.trainer.config.removed import removed_setting
from cotune.trainer.config.replay import ReplayConfig
from cotune.trainer.config.routing import RoutingConfig
from cotune.trainer.config.sampling import SamplingConfig
from cotune.trainer.config.teachers import check_teachers, teacher_of

Layout = Literal["shared", "lora", "full"]
NO_TASKS = "none"
"""`evaluation.tasks` of a run that holds no task out."""


class PlanConfig(RunPlan, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[plan] How candidates come about."""

    k: int = Plan().k
    """Candidates per call (tree), per forked call (replay), or episodes per task (independent)."""
    select: Select = Plan().select
    """Which candidate the application gets: argmax | sample | first."""


class EvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[evaluation] Held-out tasks within the run: single samples, nothing is selected."""

    tasks: str = ""
    """JSON-lines file of held-out tasks | none. Without a value a third of the run's own tasks is held out, 51 at most,
    if it has 48 or more: these are never trained on."""
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
        """A field that is given and means nothing without held-out tasks; empty where there is none."""
        return next((name for name in ("keep_best", "patience") if getattr(self, name)), "")


class TrainConfig(RunConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training run. Every field has a default but `model`."""

    model: str
    """Folder, GGUF file or Hugging Face id of the base model."""
    policies: Layout = "lora"
    """shared: one adapter for all roles | lora: one adapter per role | full: one model per role."""
    policy: tuple[PolicyConfig, ...] = ()
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
    """Tasks of a step; recorded episodes with recipe sft or dpo."""
    concurrency: int = 64
    """Episodes in flight."""
    episode_timeout: float = 600.0
    """Seconds until an episode fails."""
    max_calls: int | None = None
    """Calls after which an episode fails, as a failure of the policy; without a value four times the most that an
    episode made before the first step, at least 256."""
    mode: Literal["sync", "async"] = "sync"
    """sync: roll out, then train | async: the next steps are rolled out while this one trains."""
    max_staleness: int = 1
    """In mode async, how many versions a sample may be behind the policy that trains on it. Older samples are dropped
    and counted."""
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
    """What samples: auto | vllm | vllm-url (a vLLM server that runs already, at engine_url) | transformers (in process)
    | module:function (an async function that opens a `Sampler` of your own, called with model and engine_args). auto
    is vllm on GPUs and on Ray if it is installed and knows the model, else transformers; see docs/how-to/gpu.md."""
    engine_url: str = ""
    """Address of the server of engine = "vllm-url", such as http://10.0.0.5:8000; with several base models one for
    each, separated by commas, in any order. The key is read from VLLM_API_KEY."""
    engine_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """[engine_args] Further arguments of vLLM's engine, such as max_model_len or gpu_memory_utilization; of vllm-url:
    folder, where adapters are written for a server on another machine."""
    probe_bound: float = 0.05
    """Largest mean gap between sampler and learner log-probabilities after a publish, in nats."""
    guard: Literal["off", "warn", "stop"] = "warn"
    """If training has collapsed: warn, or end the run. Both keep the checkpoint of the best steps and print how to go
    back to it; see docs/how-to/figures.md."""
    lora: LoraSpec = LoraSpec()
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
    dpo: DpoConfig = DpoConfig()
    distill: DistillConfig = DistillConfig()

    def __post_init__(self) -> None:
        counts = ("steps", "tasks_per_step", "concurrency", "checkpoint_every", "max_staleness")
        check_bounds(self, *counts, "episode_timeout", "max_calls", "probe_bound")
        _check_failure(self.on_failure)
        check_tool_format(self.tool_format)
        check_engine(self.engine, self.engine_url, self.cluster)
        if self.engine_shares_gpu and self.mode != "sync":
            fault = f"must be sync if {self.engine} shares a GPU with the learner, as it sleeps during updates"
            raise ConfigError("mode", self.mode, fault, 'Set engine = "transformers".')
        check_teachers(self, self.model, self.sampling.temperature)
        check_records(self.recipe, self.records, self.learner)
        check_one_process(self.learner, self.cluster.on_ray, {p.kind for p in self.policy} or {self.policies})
        for name, count in Counter(p.name for p in self.policy).items():
            if count > 1:
                raise ConfigError("policy.name", name, "is the name of two policies", "Rename one of them.")
        for role, count in Counter(role for p in self.policy for role in p.roles).items():
            if count > 1:
                raise ConfigError("policy.roles", role, "is in two policies", "Remove the role from all but one.")
        check_policies(self.policy, self.specs, self.recipe, self.steps)

    @property
    def from_records(self) -> bool:
        """Whether the run learns from records, without rollouts."""
        return self.recipe in FROM_RECORDS

    @property
    def engine_kind(self) -> Engine:
        """The row of the engine in the table of engines."""
        return engine_of(self.engine)

    @property
    def engine_shares_gpu(self) -> bool:
        """Whether the engine shares its GPU with the learner, and can free it during updates."""
        return self.cluster.shares_gpu and self.engine_kind.sleeps

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine sleeps during updates. Without Ray it does so on a CPU too, where it only pauses."""
        beside_learner = self.cluster.shares_gpu or not (self.cluster.on_ray or self.cluster.gpus_per_engine)
        return self.engine_kind.sleeps and self.mode == "sync" and beside_learner

    @property
    def specs(self) -> dict[str, PolicySpec]:
        """The policies of the [[policy]] tables, by name."""
        written = first_written([self.model, *(p.model for p in self.policy if p.model)])
        models = {p.name: written[p.model or self.model] for p in self.policy}
        own = {name: None if model == self.model else model for name, model in models.items()}
        return {p.name: PolicySpec(name=p.name, kind=p.kind, lora=p.lora, model=own[p.name]) for p in self.policy}

    @property
    def bases(self) -> dict[str, list[str]]:
        """The base models, the run's own first, and the policies of each that [[policy]] tables name."""
        return Policies(self.specs, {}).bases(self.model)

    @property
    def tool_formats(self) -> dict[str, str]:
        """How each base model writes tool calls."""
        own = {self.specs[p.name].model: p.tool_format for p in self.policy if p.tool_format}
        return {model: own.get(model, self.tool_format) for model in self.bases}

    @property
    def one_format(self) -> list[str]:
        """A note where `tool_format` is that of several base models, which may write tool calls in different ways."""
        own = [self.specs[p.name].model for p in self.policy if p.tool_format]
        models = [model for model in self.bases if model not in own]
        text = f"tool_format = {self.tool_format!r} is taken for several base models: {', '.join(models)}"
        return [text] if len(models) > 1 and self.tool_format != AUTO else []

    @property
    def of_rollouts(self) -> list[str]:
        """Settings that are given and only mean something to runs with rollouts."""
        given = {
            "loss": bool(changed_settings(RewardSettings(), self.loss)),
            "rewards": bool(changed_settings(self.rewards, LossSettings())),
            "plan.kind": self.plan.kind,
            "evaluation.tasks": self.evaluation.tasks not in ("", NO_TASKS),
            f"evaluation.{self.evaluation.needing_tasks}": self.evaluation.needing_tasks,
            "guard": self.guard == "stop",
            "curriculum.pool": self.curriculum.pool != "even",
            "refill.budget": self.refill.budget,
        }
        return [name for name, value in given.items() if value]

    @property
    def episodes_at_once(self) -> int:
        """Episodes in flight."""
        return 1 if self.sampling.repeatable else self.concurrency

    @property
    def ahead(self) -> int:
        """How many steps rollouts may be ahead of training."""
        return self.max_staleness if self.mode == "async" else 0

    def settings_of(self, policy: str) -> PolicySettings:
        """What a policy is trained with: what its [[policy]] table says, else what the run says."""
        own = self.own_of(policy)
        teacher = teacher_of(self, own)
        if not isinstance(own, PolicyConfig):  # it has no table
            return PolicySettings(learner=self.learner, schedule=self.schedule, teacher=teacher)
        lr = self.learner.lr if own.lr is None else own.lr
        learner = msgspec.structs.replace(self.learner, lr=lr, weight_decay=self.decay_of(policy))
        return PolicySettings(learner=learner, schedule=own.schedule or self.schedule, teacher=teacher)

    def resolve_plan(self, scorers: Sequence[str], workflow: str = "solve") -> tuple[Plan, Recipes, str]:
        """Plan and recipes, with a sentence that says why. `workflow` is the name of its function.

        Raises ConfigError for a tree plan without a scorer, for settings that do not fit the loss of a recipe, and for
        policies whose recipes do not go together.
        """
        branches = bool(scorers) and (self.recipe is None or takes_a_tree(self.recipe))
        usual: PlanKind = "tree" if branches else "independent"
        if self.recipe is not None and recipe_class(self.recipe).plan == "replay":
            usual = "replay"
        kind = self.plan.kind or usual
        plan = Plan(kind=kind, k=self.plan.k, select=self.plan.select)
        if kind == "tree" and not scorers:
            raise ConfigError(
                "plan.kind",
                kind,
                "needs a scorer; the workflow has none",
                f"Add @{workflow}.scorer(role) for at least one role, or use --plan replay or independent.",
            )
        recipes = policy_recipes(self, kind)
        check_together(recipes)
        for chosen in recipes.every:
            if chosen.loss.token_loss and self.cluster.on_ray:
                fault = "cannot be used on a cluster, whose learners do not have its module"
                raise ConfigError("loss.token_loss", chosen.loss.token_loss, fault, "Train in one process.")
            check_own(chosen)
        if kind == "replay":
            why = "a call is judged by the outcome of the episode that goes on from it"
        elif scorers:
            why = f"scorers for {', '.join(sorted(scorers))}"
        else:
            why = "the workflow has no scorer, so only the outcome of whole episodes can be compared"
        return plan, recipes, f"plan {kind} (k={plan.k}), {recipes.names}: {why}"

    def resolve_policies(
        self, seen: Sequence[str], *, scored: Sequence[str] | None = None, workflow: str = "solve"
    ) -> Policies:
        """The policy of each role. `scored`: the roles that can be trained (None: all); a layout leaves the others
        frozen. `workflow` is the name of its function.

        Raises ConfigError for roles without a policy and policies for unknown roles.
        """
        known = sorted({*seen, *self.roles})
        able = [role for role in known if scored is None or role in scored]
        if not self.policy:
            laid = policies_for(self.policies, able, self.lora)
            rest = [role for role in known if role not in able]
            if not rest:
                return laid
            frozen = PolicySpec(name="frozen", kind="frozen")
            return Policies({**laid.specs, "frozen": frozen}, {**laid.roles, **dict.fromkeys(rest, "frozen")})
        specs = self.specs
        roles = {role: p.name for p in self.policy for role in p.roles}
        for role in roles:
            if role not in known:
                raise ConfigError(
                    "policy.roles",
                    role,
                    f"is not a role of the application: {', '.join(known)}",
                    "Correct the name, or list it under `roles` if it shows only on some tasks.",
                )
        missing = [role for role in known if role not in roles]
        if missing:
            raise ConfigError(
                "policy.roles",
                ", ".join(missing),
                "have no policy",
                'Add these roles to a policy; kind = "frozen" or "provider" leaves them untrained.',
            )
        if not any(spec.trained for spec in specs.values()):
            raise ConfigError("policy.kind", "all untrained", "leaves nothing to train", "Set one to lora or full.")
        for p in self.policy:
            if p.trained and not set(p.roles) & set(able):
                raise ConfigError(
                    "policy.kind",
                    f"{p.kind} for {p.name}",
                    "cannot be trained under the tree plan: none of its roles has a scorer",
                    f"Add @{workflow}.scorer for one of {', '.join(p.roles)}, or use --plan independent.",
                )
        return Policies(specs, roles)

    def based(self, policies: Policies) -> Policies:
        """`policies` of a checkpoint, with their base models where the configuration has them now."""
        models = {name: spec.model for name, spec in self.specs.items()}
        specs = {n: msgspec.structs.replace(spec, model=models.get(n)) for n, spec in policies.specs.items()}
        return Policies(specs, policies.roles)

    def join(self, policies: Policies, roles: Sequence[str], *, scored: Collection[str] | None = None) -> Policies:
        """`policies`, and after them those that the layout gives to `roles` that have none; `scored` as above.

        None where [[policy]] tables name all policies, or `other_roles` leaves such roles to the provider.
        """
        new = [role for role in roles if role not in policies.roles and (scored is None or role in scored)]
        if not new or self.policy or self.other_roles == "provider":
            return policies
        more = policies_for(self.policies, new, self.lora)
        return Policies({**policies.specs, **more.specs}, {**policies.roles, **more.roles})


def load_config(path: str | Path | None, flags: Mapping[str, Any]) -> TrainConfig:
    """Read TOML (if any) and apply flags over it; keys of `flags` are dotted field names, None means not given.

    Raises ConfigError naming the field, its value and what is allowed.
    """
    table = read_toml(path)
    for name, value in flags.items():
        # A file may have a table [prompts], as it serves both commands. A flag is meant for this run.
        if name.startswith("prompts."):
            remedy = "Pass it to cotune prompts improve, then cotune train --prompts FOLDER."
            raise ConfigError(name, value, "is an option of searches for prompts, and a run searches for none", remedy)
        if value is not None:
            assign(table, name, value)
    return convert(table)


def read_toml(path: str | Path | None) -> dict[str, Any]:
    """What a TOML file says; nothing where there is no `path`. Raises ConfigError."""
    if path is None:
        return {}
    path = Path(path)
    if not path.is_file():
        raise ConfigError("config", str(path), "does not exist", PAGE)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"is not valid TOML ({error})") from None


def convert(table: Mapping[str, Any]) -> TrainConfig:
    """TrainConfig from a plain table, with ConfigError for what does not fit."""
    if isinstance(table.get("cluster"), Mapping):
        table = {**table, "cluster": {"address": "local", **table["cluster"]}}
    if isinstance(table.get("records"), str | Path):
        table = {**table, "records": {"path": str(table["records"])}}
    if isinstance(prompts := table.get("prompts"), str | Path):
        raise ConfigError("prompts", str(prompts), "has another name now", "Use prompts_file for a file of prompts.")
    if isinstance(prompts, Mapping):  # options of cotune prompts improve, which may share the file
        table = {name: value for name, value in table.items() if name != "prompts"}
    if not table.get("model"):
        missing = "is missing: it is a model folder, a GGUF file or a Hugging Face id"
        raise ConfigError("model", table.get("model"), missing, "Pass --model.")
    own = table.get("policy")
    tables = [one for one in own if isinstance(one, Mapping)] if isinstance(own, list | tuple) else []
    named = [("policy.recipe", f"of policy {one.get('name')} ", one.get("recipe")) for one in tables]
    for field, of, name in [("recipe", "", table.get("recipe")), *named]:
        if isinstance(name, Mapping):
            remedy = "What a run changes of it is in [rewards] and [loss], such as loss.clip_high."
            raise ConfigError(field, dict(name), f"{of}is not the name of a recipe", remedy)
        known = {*RECIPES, *FROM_RECORDS}
        if isinstance(name, str) and name not in known and not is_own(name):
            remedy = "For a class of your own, name its file too: my_method.py:Ranked."
            raise ConfigError(field, name, f"{of}is not one of {', '.join(sorted(known))}", remedy)
    check_names(table, TrainConfig)
    try:
        return msgspec.convert(table, TrainConfig)
    except msgspec.ValidationError as error:
        raise fault(error, table, TrainConfig) from None


def assign(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a field by its dotted name. Raises ConfigError where a part of the name is no table."""
    *parents, leaf = dotted.split(".")
    if not all((*parents, leaf)):
        raise ConfigError(dotted, value, "is not the name of a field, such as lora.rank", PAGE)
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            if removed := removed_setting(dotted, value):
                raise removed
            fault = f"is not a field of the configuration: {parent} is no table"
            raise ConfigError(dotted, value, fault, PAGE)
    table[leaf] = value


def _check_failure(value: str) -> None:
    try:
        failure_reward(value)
    except ValueError:
        raise ConfigError(
            "on_failure", value, "is not lowest, exclude or reward:<number>", "For example: reward:-1"
        ) from None
