"""The trained policies of a run or an export, and what answers calls by them in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cotune.adapters.bases import Moved
from cotune.adapters.export import TrainedPolicy, best_policies, latest_policies, policies_at, untrained_policy
from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.load import load_export
from cotune.adapters.manifest import is_export, read_manifest
from cotune.episodes.workflows import Workflow
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.chat.formats import load_formats
from cotune.integrations.models.chat.tool_formats import AUTO
from cotune.integrations.models.engines import EngineConfig, products_dtype
from cotune.integrations.models.folder.folder import locate_base, locate_model, of_policy
from cotune.integrations.models.per_policy import open_engines
from cotune.records.policies import OtherRoles, Policies, PolicySpec, models_said, stand_in
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import ChatFormat, SamplingParams, at_temperature, fingerprint, publish_verified
from cotune.sampling.responder import PolicyResponder
from cotune.storage.run_layout import read_run
from cotune.trainer.evaluation.modes import MODES
from cotune.trainer.evaluation.sources import read_trained


@dataclass(frozen=True)
class EvaluatedPolicies:
    """Policies with their weights. The base of each is its version 0, and `model` that of the run's own, by folder or
    Hugging Face id.

    `other_roles` says what plays a role without a policy, and `tool_format` how the run's own model writes tool calls.
    Policies have tool formats of their own.
    """

    model: str
    policies: Sequence[TrainedPolicy]
    other_roles: OtherRoles = "frozen"
    tool_format: str = AUTO

    @property
    def roles(self) -> dict[str, PolicyRef]:
        """The trained version of each role that is not left to a provider."""
        return {
            role: PolicyRef(policy.name, policy.version)
            for policy in self.policies
            if policy.kind != "provider"
            for role in policy.roles
        }

    @property
    def trained(self) -> list[str]:
        """Names of the policies that have weights of their own."""
        return [policy.name for policy in self.policies if policy.weights is not None]

    @property
    def provider_roles(self) -> list[str]:
        return [role for policy in self.policies if policy.kind == "provider" for role in policy.roles]

    @property
    def bases(self) -> dict[str, list[str]]:
        """The base models, `model` first, and the policies of each."""
        specs = {p.name: PolicySpec(name=p.name, kind=p.kind, model=p.model) for p in self.policies}
        return Policies(specs, {}).bases(self.model)

    def check_bases(self) -> None:
        """Raises ConfigError where a base model is not there, AdapterError where it is not that of the run."""
        for model, names in self.bases.items():
            folder = locate_base(model, of="" if model == self.model else names[0])
            if known := [policy for policy in self.policies if policy.name in names and policy.trained_on]:
                found = base_fingerprint(folder)
                for policy in known:
                    policy.check_trained_on(model, found)

    @contextlib.asynccontextmanager
    async def responder(
        self, *, threads: int | None = None, say: Callable[[str], None] = lambda text: None, **options: Any
    ) -> AsyncIterator[PolicyResponder]:
        """These policies in a sampler of this process, answering calls; `options` are further fields of the responder.

        `say` is told what takes time. Raises SyncError when a policy arrives altered.
        """
        say(f"loading {models_said(self.bases)} ...")
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
        """The chat format of the run's own model, and that of each policy by name. Raises ConfigError.

        Policies of several runs may have one base and write tool calls in different formats.
        """
        loaded: dict[tuple[str, str], ChatFormat] = {}

        def load(model: str, tool_format: str) -> ChatFormat:
            if (model, tool_format) not in loaded:
                loaded[model, tool_format] = load_formats({model: []}, tool_format).own
            return loaded[model, tool_format]

        own = load(self.model, self.tool_format)
        chats: dict[str, ChatFormat] = {}
        for policy in self.policies:
            if policy.kind != "provider":
                try:
                    chats[policy.name] = load(policy.model or self.model, policy.tool_format)
                except ConfigError as error:
                    raise of_policy(error, policy.name) from None
        return own, chats

    def _dtype_on(self, model: str) -> str | None:
        """The precision in which all adapters on a base were trained; None if they differ, or if it is not known."""
        dtypes = {policy.dtype for policy in self.policies if policy.weights is not None and policy.model == model}
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
    """Who answers an application's calls where a command runs it again: the `policies` of a run (RUN or RUN#STEP) or an
    export, else an untrained `model`; None for the application's own provider.

    `put_back` is the remedy where a base model of the policies is not there or another one; `options` are further ones
    of `EvaluatedPolicies.responder`. Raises RunError, AdapterError, ConfigError, SyncError.
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
    """Untrained models, each as a frozen policy that is named after it; the first is the model of the whole.

    Raises ConfigError for no model, for one that is named twice, and for one that cannot be loaded.
    """
    texts = [str(model) for model in models]
    if not texts:
        raise ConfigError("bases", None, "is missing", "Name a model folder or a Hugging Face id: --base FOLDER_OR_ID.")
    for place, text in enumerate(texts):
        if text in texts[:place]:
            raise ConfigError("bases", text, "is named twice", "Name each model once.")
    # A short name where that tells them apart: Qwen3-1.7B of Qwen/Qwen3-1.7B.
    short = [Path(text).name or text for text in texts]
    names = short if len(set(short)) == len(texts) else texts
    policies = []
    for name, text in zip(names, texts, strict=True):
        if name in MODES:
            name = text if text not in MODES else f"./{text}"
        try:
            locate_model(text)
        except ConfigError as error:
            raise ConfigError("bases", text, error.fault, error.remedy) from None
        policies.append(TrainedPolicy(name=name, kind="frozen", version=0, roles=(), model=text))
    return EvaluatedPolicies(texts[0], policies)


def open_evaluated_policies(
    source: str | Path, model: Moved = None, *, step: int | Literal["best"] | None = None
) -> EvaluatedPolicies:
    """Read the newest checkpoint of a run, its checkpoint after `step` steps, the "best" one of each policy, or an
    export (hashes checked).

    `model` says where base models are now, if elsewhere. Raises RunError, AdapterError, ConfigError.
    """
    folder = Path(source)
    if is_export(folder):
        manifest = read_manifest(folder)
        export = load_export(folder, model, untrained=True)
        engine_of = {policy.name: engine for engine in export.engines for policy in engine.policies}
        base = str(export.engines[0].folder) if export.engines else None
        policies = []
        for policy in manifest.policies:
            engine = engine_of.get(policy.name)
            opened = TrainedPolicy(
                name=policy.name,
                kind=policy.kind,
                version=policy.version,
                roles=[entry.role for entry in manifest.roles if entry.policy == policy.name],
                model=str(engine.folder) if engine else None,
                weights=export.weights(policy),
                lora=policy.lora,
                tool_format=engine.base.tool_format if engine else AUTO,
                dtype=engine.base.dtype if engine else None,
                stayed=policy.stayed,
                step=policy.step,
            )
            policies.append(opened)
        other_roles = manifest.other_roles
        tool_format = export.engines[0].base.tool_format if export.engines else AUTO
    else:
        if step is None:
            policies = latest_policies(folder, model)
        elif step == "best":
            policies = best_policies(folder, model)
        else:
            policies = policies_at(folder, step, model)
        others = untrained_policy(folder, model)
        config = read_run(folder).config
        base = others.model if others else next((policy.model for policy in policies if policy.model), None)
        other_roles, tool_format = config.other_roles, config.tool_format
    if base is None:
        raise AdapterError(f"{folder} leaves every role to a provider.", "There is nothing to evaluate against it.")
    return EvaluatedPolicies(base, policies, other_roles, tool_format)
