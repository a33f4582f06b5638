"""The trained policies of a run or an export, and a responder that answers calls with them in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cotune.adapters.bases import Moved
from cotune.adapters.export import TrainedPolicy, best_policies, latest_policies, policies_at, untrained_policy
from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.load import EngineModel, load_export
from cotune.adapters.manifest import is_export, read_manifest
from cotune.episodes.workflows import Workflow
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.chat.formats import load_formats
from cotune.integrations.models.chat.tool_formats import AUTO
from cotune.integrations.models.engines import EngineConfig, products_dtype
from cotune.integrations.models.folder.folder import locate_base, locate_model, of_policy
from cotune.integrations.models.per_policy import open_engines
from cotune.records.policies import OtherRoles, Policies, PolicySpec, models_text, stand_in
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import ChatFormat, SamplingParams, at_temperature, fingerprint, publish_verified
from cotune.sampling.responder import PolicyResponder
from cotune.storage.run_layout import read_run
from cotune.trainer.evaluation.modes import MODES
from cotune.trainer.evaluation.sources import read_trained


@dataclass(frozen=True)
class EvaluatedPolicies:
    """Policies with their weights. Version 0 of a policy is its base model."""

    model: str
    """The base model of the run: a folder or a Hugging Face id."""
    policies: Sequence[TrainedPolicy]
    other_roles: OtherRoles = "frozen"
    """Who plays a role without a policy."""
    tool_format: str = AUTO
    """How `model` writes tool calls. Each policy has a tool format, too."""

    @property
    def roles(self) -> dict[str, PolicyRef]:
        """The trained version of each role that is not left to a provider."""
        roles: dict[str, PolicyRef] = {}
        for policy in self.policies:
            if policy.kind != "provider":
                roles |= dict.fromkeys(policy.roles, PolicyRef(policy.name, policy.version))
        return roles

    @property
    def trained(self) -> list[str]:
        """Names of the policies with trained weights."""
        return [policy.name for policy in self.policies if policy.weights is not None]

    @property
    def evaluation_sampling(self) -> dict[str, Mapping[str, Any]]:
        """The `top_p`, `top_k` and `min_p` of the policies that have their own, by the name of the policy."""
        return {policy.name: policy.evaluation_sampling for policy in self.policies if policy.evaluation_sampling}

    @property
    def provider_roles(self) -> list[str]:
        """Roles that are left to the application's own provider."""
        roles: list[str] = []
        for policy in self.policies:
            if policy.kind == "provider":
                roles += policy.roles
        return roles

    @property
    def bases(self) -> dict[str, list[str]]:
        """The base models, `model` first, and the policies of each."""
        specs = {p.name: PolicySpec(name=p.name, kind=p.kind, model=p.model) for p in self.policies}
        return Policies(specs, {}).bases(self.model)

    def check_bases(self) -> None:
        """Raise ConfigError if a base model does not exist, AdapterError if it is not the one of the training."""
        for model, names in self.bases.items():
            folder = locate_base(model, of="" if model == self.model else names[0])
            trained = [policy for policy in self.policies if policy.name in names and policy.trained_on]
            if trained:
                base = base_fingerprint(folder)
                for policy in trained:
                    policy.check_trained_on(model, base)

    @contextlib.asynccontextmanager
    async def responder(
        self, *, threads: int | None = None, say: Callable[[str], None] = lambda text: None, **options: Any
    ) -> AsyncIterator[PolicyResponder]:
        """Load these policies into a sampler of this process, and yield a responder that answers calls with them.

        `options` are further fields of the responder. `say` gets messages before steps that take long. Raises SyncError
        if a policy arrives altered.
        """
        say(f"loading {models_text(self.bases)} ...")
        chat, chats = await asyncio.to_thread(self._load_chats)
        sampler = await open_engines(
            self.bases,
            lambda model: EngineConfig(model=model, threads=threads, dtype=products_dtype(self._dtype_on(model))),
        )
        try:
            say("publishing the policies ...")
            for policy in self.policies:
                if policy.weights is not None:
                    lora = policy.lora if policy.kind == "lora" else None
                    ref = PolicyRef(policy.name, policy.version)
                    await publish_verified(sampler, ref, policy.weights, lora, fingerprint(policy.weights))
            yield PolicyResponder(
                sampler,
                chat,
                self.roles,
                chats=chats,
                provider_roles=self.provider_roles,
                others=stand_in(self.other_roles),
                **options,
            )
        finally:
            await sampler.aclose()

    def _load_chats(self) -> tuple[ChatFormat, dict[str, ChatFormat]]:
        """Load the chat format of `model`, and the chat format of each policy by name. Raises ConfigError.

        Policies of several runs may share one base model and still write tool calls in different formats.
        """
        loaded: dict[tuple[str, str], ChatFormat] = {}

        def load(model: str, tool_format: str) -> ChatFormat:
            if (model, tool_format) not in loaded:
                loaded[model, tool_format] = load_formats({model: []}, tool_format).own
            return loaded[model, tool_format]

        chat = load(self.model, self.tool_format)
        chats: dict[str, ChatFormat] = {}
        for policy in self.policies:
            if policy.kind != "provider":
                try:
                    chats[policy.name] = load(policy.model or self.model, policy.tool_format)
                except ConfigError as error:
                    raise of_policy(error, policy.name) from None
        return chat, chats

    def _dtype_on(self, model: str) -> str | None:
        """Return the precision in which all policies on a base were trained; None if they differ, or if it is not
        known."""
        with_weights = [policy for policy in self.policies if policy.weights is not None]
        dtypes = {policy.dtype for policy in with_weights if policy.model == model}
        return dtypes.pop() if len(dtypes) == 1 else None


@contextlib.asynccontextmanager
async def answering(
    workflow: Workflow,
    *,
    policies: str | Path | None,
    model: str | None,
    max_tokens: int,
    temperature: float | None,
    put_back: str = "",
    **options: Any,
) -> AsyncIterator[PolicyResponder | None]:
    """Yield the responder for a command that runs an application.

    It answers with the `policies` of a run (RUN or RUN#STEP) or an export, else with an untrained `model`. Without both
    it is None, so that the application's own provider answers.

    `put_back` replaces the remedy of an error about a base model that is missing or differs. `options` are further
    options of `EvaluatedPolicies.responder`. Raises RunError, AdapterError, ConfigError, SyncError.
    """
    if policies is None and model is None:
        yield None
        return
    if policies is not None:
        trained = read_trained(policies, "run")
        evaluated = open_evaluated_policies(trained.place, step=trained.step)
        try:
            evaluated.check_bases()
        except ConfigError as error:
            raise ConfigError(error.field, error.value, error.fault, put_back or error.remedy) from None
        except AdapterError as error:
            raise AdapterError(error.cause, put_back or error.remedy) from None
    else:
        evaluated = EvaluatedPolicies(str(locate_model(model or "")), ())
    async with evaluated.responder(
        scorers=workflow.scorers,
        defaults=SamplingParams(max_tokens=max_tokens),
        override=at_temperature(temperature),
        **options,
    ) as responder:
        yield responder


def open_models(models: Sequence[str | Path]) -> EvaluatedPolicies:
    """Open untrained models, each as a frozen policy with the name of its model. The first is also the `model` of the
    result.

    Raises ConfigError without a model, for a model that is named twice, and for a model that cannot be loaded.
    """
    texts = [str(model) for model in models]
    if not texts:
        raise ConfigError("bases", None, "is missing", "Name a model folder or a Hugging Face id: --base FOLDER_OR_ID.")
    for index, text in enumerate(texts):
        if text in texts[:index]:
            raise ConfigError("bases", text, "is named twice", "Name each model once.")
    # Short names, if they are unique: Qwen3-1.7B for Qwen/Qwen3-1.7B.
    short_names = [Path(text).name or text for text in texts]
    names = short_names if len(set(short_names)) == len(texts) else texts
    policies = []
    for name, text in zip(names, texts, strict=True):
        # The label of an evaluation must differ from the names of the modes. A folder that is called `base`, for
        # example, gets its path as the label.
        label = name
        if label in MODES:
            label = text
        if label in MODES:
            label = f"./{text}"
        try:
            locate_model(text)
        except ConfigError as error:
            raise ConfigError("bases", text, error.fault, error.remedy) from None
        policies.append(TrainedPolicy(name=label, kind="frozen", version=0, roles=(), model=text))
    return EvaluatedPolicies(texts[0], policies)


def open_evaluated_policies(
    source: str | Path, model: Moved = None, *, step: int | Literal["best"] | None = None
) -> EvaluatedPolicies:
    """Read the policies of a run or of an export, whose hashes are checked.

    Of a run these are the newest checkpoint, the checkpoint after `step` steps, or the "best" one of each policy.
    `model` is the present location of base models, if they were moved. Raises RunError, AdapterError, ConfigError.
    """
    folder = Path(source)
    if is_export(folder):
        return _open_policies_of_export(folder, model)
    if step is None:
        policies = latest_policies(folder, model)
    elif step == "best":
        policies = best_policies(folder, model)
    else:
        policies = policies_at(folder, step, model)
    config = read_run(folder).config
    # The run's own base model plays roles without a policy. If no role needs it, any policy's base stands in.
    untrained = untrained_policy(folder, model)
    if untrained is not None:
        base = untrained.model
    else:
        base = next((policy.model for policy in policies if policy.model), None)
    return EvaluatedPolicies(_require_base(base, folder), policies, config.other_roles, config.tool_format)


def _open_policies_of_export(folder: Path, model: Moved) -> EvaluatedPolicies:
    """Open the policies of an exported folder, with the roles that its manifest gives to each."""
    manifest = read_manifest(folder)
    export = load_export(folder, model, untrained=True)
    engine_of_policy: dict[str, EngineModel] = {}
    for engine in export.engines:
        engine_of_policy |= dict.fromkeys([policy.name for policy in engine.policies], engine)
    policies: list[TrainedPolicy] = []
    for policy in manifest.policies:
        own_engine = engine_of_policy.get(policy.name)
        trained = TrainedPolicy(
            name=policy.name,
            kind=policy.kind,
            version=policy.version,
            roles=[entry.role for entry in manifest.roles if entry.policy == policy.name],
            model=str(own_engine.folder) if own_engine else None,
            weights=export.weights(policy),
            lora=policy.lora,
            tool_format=own_engine.base.tool_format if own_engine else AUTO,
            dtype=own_engine.base.dtype if own_engine else None,
            stayed=policy.stayed,
            step=policy.step,
        )
        policies.append(trained)
    base = None
    tool_format = AUTO
    if export.engines:
        first = export.engines[0]
        base = str(first.folder)
        tool_format = first.base.tool_format
    return EvaluatedPolicies(_require_base(base, folder), policies, manifest.other_roles, tool_format)


def _require_base(base: str | None, folder: Path) -> str:
    """Return the base model. Raises AdapterError if there is none, because a provider plays every role."""
    if base is None:
        raise AdapterError(f"{folder} leaves every role to a provider.", "There is nothing to evaluate against it.")
    return base
