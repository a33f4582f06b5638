"""Opens the policies of an export, or a plain model, in engines of this process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from cotune.adapters.bases import Moved
from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.load import Export, load_export
from cotune.adapters.manifest import Base, ExportedPolicy, Manifest, is_export
from cotune.adapters.restarting import EngineThatEnds, Restarting
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.tool_formats import AUTO, check_tool_format
from cotune.integrations.models.engines import EngineConfig, open_sampler, products_dtype
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.per_policy import PolicySampler
from cotune.records.policies import UNTRAINED
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import ChatFormat, Sampler


@dataclass(frozen=True)
class ServedModel:
    """A model name and its policy."""

    name: str
    policy: PolicyRef
    kind: str
    base: str
    """Folder or id of the base model."""
    base_sha256: str
    """SHA-256 of the base model's weights."""
    fingerprint: str
    """Fingerprint of the trained weights, or of the base model's weights if the policy is not trained."""


@dataclass(frozen=True)
class LocalPolicies:
    """The policies of an export, or a plain model, in engines of this process."""

    sampler: Sampler
    """Samples from all policies, which are published to it."""
    chat: ChatFormat
    served: Mapping[str, ServedModel]
    """Role or model name -> its policy."""
    left_to_provider: Sequence[str]
    """Roles that the application's provider answers."""
    max_model_len: int
    others: ServedModel | None = None
    """Answers for every unlisted role; None leaves these to the application's provider."""
    chats: Mapping[str, ChatFormat] = field(default_factory=dict)
    """Policy name -> the chat format of its base, if it differs from `chat`."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Policy name -> the context length of its base, if it differs from `max_model_len`."""
    engines: Sequence[Restarting] = ()
    """One engine for each base model."""
    manifest: Manifest | None = None
    """The manifest of the export; None for a plain model."""

    def length(self, policy: PolicyRef) -> int:
        """The most tokens that a prompt of this policy and its reply may have together."""
        return self.lengths.get(policy.name, self.max_model_len)

    async def aclose(self) -> None:
        await self.sampler.aclose()


async def open_local(
    source: str | Path,
    *,
    base: Moved = None,
    names: Sequence[str] = (),
    tool_format: str | None = None,
    untrained: bool = False,
) -> LocalPolicies:
    """Open an export, or a model folder or Hugging Face id served under its own name and `names`.

    `base` is the present place of moved base models of an export. `tool_format` is the format of the model's tool
    calls; None takes the format of the export, or "auto". With `untrained` the base model of an export can answer too.
    Raises AdapterError, ConfigError, SyncError before anything is served.
    """
    check_tool_format(tool_format or AUTO)
    if not is_export(Path(source)):
        return await _open_model(source, base, names, tool_format or AUTO)
    if names:
        raise ConfigError("role", names[0], "cannot be used with an export, which names its roles", "Leave it out.")
    export = load_export(source, base, untrained=untrained)
    if untrained:
        base_of_unlisted_roles(export.manifest)  # raises before an engine starts
    if not export.engines:
        raise AdapterError(f"{export.folder} leaves every role to a provider.", "There is nothing to serve.")
    if tool_format and len(export.engines) > 1:
        fault = f"would apply to several base models: {', '.join(engine.base.model for engine in export.engines)}"
        remedy = "Write it into roles.json, as tool_format of each `base` of that model."
        raise ConfigError("tool_format", tool_format, fault, remedy)
    return await _open_export(export, tool_format)


async def _open_model(source: str | Path, base: Moved, names: Sequence[str], tool_format: str) -> LocalPolicies:
    """Open an engine for a plain model folder, which answers under the folder's name and under `names`."""
    if base is not None:
        fault = "cannot be used with a plain model, which is the base itself"
        raise ConfigError("model", str(base), fault, "Leave it out.")
    try:
        folder = locate_model(source)
    except ConfigError as error:
        # The source may also have been meant as an export.
        fault = error.fault.replace("is not a model folder", "is not an export, model folder", 1)
        raise ConfigError(error.field, error.value, fault, error.remedy) from None
    digest = base_fingerprint(folder).weights
    policy = PolicyRef("base", 0)
    model_name = folder.name if Path(source).expanduser().exists() else str(source)
    served = {}
    for name in (model_name, *names):
        served[name] = ServedModel(
            name, policy, kind="frozen", base=str(source), base_sha256=digest, fingerprint=digest
        )
    engine = await _open_engine(lambda: folder, tool_format)
    return LocalPolicies(
        engine.sampler,
        engine.chat,
        served,
        left_to_provider=[],
        max_model_len=engine.max_model_len,
        engines=[engine.sampler],
    )


async def _open_export(export: Export, tool_format: str | None) -> LocalPolicies:
    """Open the engines of an export, and assign a policy to each of its roles."""
    opened_engines = await _open_engines(export, tool_format)

    # The first engine's chat format and length are the default; policies on other engines have their own.
    manifest = export.manifest
    first = opened_engines[0]
    engine_of_policy: dict[str, _OpenedEngine] = {}
    for model, engine in zip(export.engines[1:], opened_engines[1:], strict=True):
        for policy in model.policies:
            engine_of_policy[policy.name] = engine
    sampler: Sampler = first.sampler
    if len(opened_engines) > 1:
        sampler = PolicySampler({name: engine.sampler for name, engine in engine_of_policy.items()}, first.sampler)
    served = {role: served_policy(role, manifest.policy(role)) for role in export.roles}
    return LocalPolicies(
        sampler,
        first.chat,
        served,
        left_to_provider=[entry.role for entry in manifest.roles if entry.role not in served],
        max_model_len=first.max_model_len,
        others=served_base(manifest.other_base) if manifest.other_base else None,
        chats={name: engine.chat for name, engine in engine_of_policy.items()},
        lengths={name: engine.max_model_len for name, engine in engine_of_policy.items()},
        engines=[engine.sampler for engine in opened_engines],
        manifest=manifest,
    )


async def _open_engines(export: Export, tool_format: str | None) -> list[_OpenedEngine]:
    """Open an engine for each base model of an export, all at once. If one fails, close the others."""
    opening = []
    for engine in export.engines:
        open_engine = _open_engine(
            find_folder=functools.partial(export.model_folder, engine),
            tool_format=tool_format or engine.base.tool_format,
            dtype=engine.base.dtype,
            publish=functools.partial(export.publish, engine),
            name=engine.base.model if len(export.engines) > 1 else "",
        )
        opening.append(asyncio.create_task(open_engine))
    try:
        return await asyncio.gather(*opening)
    except BaseException:
        for task in opening:
            task.cancel()
        for result in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(result, _OpenedEngine):
                await result.sampler.aclose()
        raise


def served_policy(name: str, policy: ExportedPolicy) -> ServedModel:
    """A policy of an export under a name."""
    assert policy.base is not None, "policies of a provider are served by nobody here"
    digest = policy.base.sha256.weights
    return ServedModel(name, policy.ref, policy.kind, policy.base.model, digest, policy.fingerprint or digest)


def served_base(base: Base) -> ServedModel:
    """The untrained model, for names that belong to no role."""
    return served_policy("", ExportedPolicy(name=UNTRAINED.name, kind="frozen", version=0, base=base))


def base_of_unlisted_roles(manifest: Manifest) -> Base:
    """The base model that answers names without a policy (`--default base`).

    Raises ConfigError if the policies have different base models and the export chooses none of them.
    """
    if manifest.other_base is not None:
        return manifest.other_base
    if len(manifest.bases) > 1:
        models = ", ".join(base.model for base in manifest.bases)
        fault = f"is ambiguous: the policies have different base models ({models})"
        raise ConfigError("default", UNTRAINED.name, fault, "Name a policy.")
    return manifest.bases[0]


@dataclass(frozen=True)
class _OpenedEngine:
    """An engine of one base model, and how requests to it are rendered."""

    sampler: Restarting
    chat: ChatFormat
    max_model_len: int


async def _open_engine(
    find_folder: Callable[[], Path],
    tool_format: str,
    dtype: str | None = None,
    publish: Callable[[Sampler], Awaitable[None]] | None = None,
    name: str = "",
) -> _OpenedEngine:
    """Open an engine on the model folder that `find_folder` returns, and send it policies by `publish`.

    `dtype` is the precision of the base in training. `name` names the engine in messages. A restart calls `find_folder`
    and `publish` again, because the folder may have moved by then.
    """

    async def open_and_publish() -> EngineThatEnds:
        """Open the engine and load the adapters into it. It is closed if they cannot be loaded."""
        config = EngineConfig(model=str(find_folder()), dtype=products_dtype(dtype))
        sampler = cast(EngineThatEnds, await open_sampler(config))
        try:
            if publish is not None:
                await publish(sampler)
        except BaseException:
            await sampler.aclose()
            raise
        return sampler

    starting = asyncio.create_task(open_and_publish())
    try:
        # The chat format and its grammars load while the engine starts.
        chat = await asyncio.to_thread(ChatTemplate.load, find_folder(), tool_format)
        await asyncio.to_thread(chat.open_grammars)
        sampler = await starting
        info = await sampler.info()
    except BaseException:
        starting.cancel()
        # An engine that had started already must not outlive the error.
        has_started = starting.done() and not starting.cancelled() and starting.exception() is None
        if has_started:
            await starting.result().aclose()
        raise
    return _OpenedEngine(Restarting(open_and_publish, sampler, name), chat, info.max_model_len)
