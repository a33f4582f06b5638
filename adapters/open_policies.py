"""Opens trained policies in this process: an export after checking it, or a plain model, with sampler and template."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from cotune.adapters.export import read_weights
from cotune.adapters.fingerprint import base_fingerprint, changed
from cotune.adapters.manifest import MANIFEST, ExportedPolicy, Manifest, is_export, read_manifest
from cotune.errors import AdapterError, ConfigError, CotuneError, EngineLost, SamplerError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.tool_formats import AUTO, check_tool_format
from cotune.integrations.models.engines import EngineConfig, open_sampler
from cotune.integrations.models.folder.folder import ADAPTER_FILE, locate_model, read_parameters
from cotune.near_names import did_you_mean, near_names
from cotune.records.policies import LoraSpec, stand_in
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import (
    ChatFormat,
    Completion,
    Sampler,
    SamplerInfo,
    SamplingParams,
    Weights,
    fingerprint,
    publish_verified,
)


@dataclass(frozen=True)
class ServedModel:
    """A model name and its policy. `base` is the folder or id of the base model, `base_sha256` its
    weights, `fingerprint` that of the trained weights (of the base where nothing is trained)."""

    name: str
    policy: PolicyRef
    kind: str
    base: str
    base_sha256: str
    fingerprint: str


@dataclass(frozen=True)
class LocalPolicies:
    """A sampler in this process with the policies of each role published to it.

    `others` answers for any role or name that is not listed; None leaves
    it to its provider.
    """

    sampler: Sampler
    chat: ChatFormat
    served: Mapping[str, ServedModel]
    left_to_provider: Sequence[str]
    max_model_len: int
    others: ServedModel | None = None

    async def aclose(self) -> None:
        await self.sampler.aclose()


async def open_local(
    source: str | Path,
    *,
    base: str | Path | None = None,
    names: Sequence[str] = (),
    tool_format: str | None = None,
) -> LocalPolicies:
    """Open an export, or a model folder or Hugging Face id served under its own name and `names`.

    `tool_format` is how the model writes tool calls; None: as the export says, or "auto".
    Raises AdapterError, ConfigError, SyncError before anything is served.
    """
    check_tool_format(tool_format or AUTO)
    if not is_export(Path(source)):
        return await _open_model(source, base, names, tool_format or AUTO)
    if names:
        raise ConfigError("role", names[0], "cannot be used with an export, which names its roles", "Leave it out.")
    export = load_export(source, base)
    if export.model is None:
        raise AdapterError(f"{export.folder} leaves every role to a provider.", "There is nothing to serve.")
    served = {}
    for role, ref in export.roles.items():
        policy = export.manifest.policy(role)
        if policy.base is not None:
            digest = policy.base.sha256.weights
            served[role] = ServedModel(role, ref, policy.kind, policy.base.model, digest, policy.fingerprint or digest)
    left = [entry.role for entry in export.manifest.roles if entry.role not in served]
    local = await _open(export.model, served, left, tool_format or export.manifest.tool_format, export)
    if (untrained := stand_in(export.manifest.other_roles)) is None:
        return local
    model = next(policy.base for policy in export.manifest.policies if policy.base)
    digest = model.sha256.weights
    return replace(local, others=ServedModel("any other", untrained, "frozen", model.model, digest, digest))


def with_aliases(local: LocalPolicies, aliases: Mapping[str, str]) -> LocalPolicies:
    """The same under further names: a role answers for each name that `aliases` gives it.

    Raises ConfigError for a role that is not served, and a name that is.
    """
    for name, role in aliases.items():
        if role not in local.served:
            fault = f"names a role that is not served; the roles are {', '.join(local.served)}"
            raise ConfigError("aliases", f"{name}={role}", fault, did_you_mean(near_names(role, local.served)))
        if name in local.served:
            raise ConfigError("aliases", f"{name}={role}", f"cannot rename a role: {name} is one", "Leave it out.")
    return replace(local, served={**local.served, **{name: local.served[role] for name, role in aliases.items()}})


async def _open_model(
    source: str | Path, base: str | Path | None, names: Sequence[str], tool_format: str
) -> LocalPolicies:
    if base is not None:
        fault = "cannot be used with a plain model, which is the base itself"
        raise ConfigError("model", str(base), fault, "Leave it out.")
    try:
        folder = locate_model(source)
    except ConfigError as error:
        fault = error.fault.replace("is not a model folder", "is not an export, model folder", 1)
        raise ConfigError(error.field, error.value, fault, error.remedy) from None
    digest, policy = base_fingerprint(folder).weights, PolicyRef("base", 0)
    own = folder.name if Path(source).expanduser().exists() else str(source)
    served = {name: ServedModel(name, policy, "frozen", str(source), digest, digest) for name in (own, *names)}
    return await _open(folder, served, [], tool_format)


async def _open(
    model: Path,
    served: Mapping[str, ServedModel],
    left: Sequence[str],
    tool_format: str,
    export: Export | None = None,
) -> LocalPolicies:
    async def opened() -> EngineThatEnds:
        sampler = cast(EngineThatEnds, await open_sampler(EngineConfig(model=str(model))))
        try:
            if export is not None:
                await export.publish(sampler)
        except BaseException:
            await sampler.aclose()
            raise
        return sampler

    starting = asyncio.create_task(opened())
    try:
        chat = await asyncio.to_thread(ChatTemplate.load, model, tool_format)
        await asyncio.to_thread(chat.open_grammars)  # while the engine loads, in a process of its own
        sampler = await starting
        info = await sampler.info()
    except BaseException:
        starting.cancel()
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            await starting.result().aclose()
        raise
    return LocalPolicies(Restarting(opened, sampler), chat, served, left, info.max_model_len)


_UNREAD = (".md", ".gitattributes", ".gitignore", ".DS_Store")
"""Ends of names of files that no loader reads: they may be added to an export."""


@dataclass(frozen=True)
class Export:
    """A checked export. `model` is the folder that a sampler is built from; None where all is left to a provider."""

    folder: Path
    manifest: Manifest
    model: Path | None

    @property
    def roles(self) -> dict[str, PolicyRef]:
        """Role -> policy version, for the roles that this export answers (not those left to a provider)."""
        played = {entry.role: self.manifest.policy(entry.role) for entry in self.manifest.roles}
        return {role: policy.ref for role, policy in played.items() if policy.kind != "provider"}

    def weights(self, policy: ExportedPolicy) -> Weights | None:
        """Trained weights of a policy, checked against their fingerprint; None where there are none."""
        if policy.folder is None:
            return None
        folder = self.folder / policy.folder
        weights = read_weights(folder / ADAPTER_FILE) if policy.kind == "lora" else read_parameters(folder)
        found = fingerprint(weights)
        if found != policy.fingerprint:
            raise AdapterError(
                f"{folder}: the weights have fingerprint {found}, roles.json says {policy.fingerprint}.",
                "Export the run again.",
            )
        return weights

    async def publish(self, sampler: Sampler) -> None:
        """Publish every trained policy. Raises SyncError when one arrives altered."""
        for policy in self.manifest.policies:
            weights = self.weights(policy)
            if weights is not None and policy.fingerprint is not None:
                await publish_verified(sampler, policy.ref, weights, policy.lora, policy.fingerprint)


def load_export(folder: str | Path, base: str | Path | None = None) -> Export:
    """Open an export and check it: manifest, hash of every file, base model.

    `base` replaces the recorded path of the base model; its content must be the same. Raises AdapterError.
    """
    path = Path(folder)
    if not path.is_dir():
        raise AdapterError(f"There is no folder {path}.", "Name a folder that cotune export wrote.")
    manifest = read_manifest(path)
    for policy in manifest.policies:
        _check_files(path, policy)
        if policy.gguf is not None:
            raise AdapterError(
                f"{path} holds GGUF files, which llama.cpp, Ollama and LM Studio read.",
                "Export without --gguf for cotune.",
            )
    return Export(path, manifest, _model_folder(path, manifest, base))


def _check_files(export: Path, policy: ExportedPolicy) -> None:
    """Raise AdapterError unless the listed files are unchanged inside the export, with no other that a loader reads."""
    if policy.folder is None:
        return
    folder, where, inside = export / policy.folder, f"Policy {policy.name!r}", export.resolve()
    outside = next((path for path in (folder, *folder.rglob("*")) if not path.resolve().is_relative_to(inside)), None)
    if outside is not None:
        raise AdapterError(f"{where}: {outside} leads outside the export.", "Replace the link by the file.")
    if wrong := changed(folder, policy.files, MANIFEST):
        raise AdapterError(f"{where}: {folder}: {wrong}.", "The file was changed or damaged: export the run again.")
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    added = sorted(name for name in names if name not in policy.files and not name.endswith(_UNREAD))
    if added:
        raise AdapterError(
            f"{where}: {folder / added[0]} is not in roles.json, but loaders of the folder may read it.",
            "Remove it, or export the run again.",
        )


def _model_folder(export: Path, manifest: Manifest, given: str | Path | None) -> Path | None:
    """The folder that a sampler is built from: the checked base, or a full model where nothing needs a base."""
    kinds = {policy.kind for policy in manifest.policies}
    full = next((policy for policy in manifest.policies if policy.kind == "full"), None)
    if given is None and full is not None and not kinds & {"lora", "frozen"} and manifest.other_roles != "frozen":
        return export / str(full.folder)
    bases = {policy.base.model: policy.base for policy in manifest.policies if policy.base}
    if len(bases) > 1:
        raise AdapterError(
            f"The export needs several base models: {', '.join(bases)}.", "Serve each with a server of its own."
        )
    if not bases:
        return None
    (recorded,) = bases.values()
    try:
        folder = locate_model(given or recorded.model)
    except ConfigError as error:
        raise AdapterError(f"The base model cannot be loaded: {error.cause}", "Name its folder by --model.") from None
    found = base_fingerprint(folder)
    if wrong := recorded.sha256.differences(found):
        part = wrong[0]
        raise AdapterError(
            f"The export was trained on another base: {', '.join(wrong)} of {folder} differ ({part} has SHA-256 "
            f"{getattr(found, part)}, roles.json says {getattr(recorded.sha256, part)}).",
            f"Name by --model the copy of {recorded.model} that it was trained on.",
        )
    return folder


class EngineThatEnds(Sampler, Protocol):
    """A sampler that can say why its engine has ended."""

    @property
    def broken(self) -> SamplerError | None:
        """Why it answers no more; None while it does."""


RESTARTS, WITHIN = 3, 600.0
"""How often an engine is started again within so many seconds."""
log = logging.getLogger("cotune.engine")


@dataclass(eq=False)
class Restarting:
    """A `Sampler`. Requests that an engine's end fails are sent once more to the next engine.

    `opened` opens an engine with all that it serves. May be used from any event loop.
    """

    opened: Callable[[], Coroutine[Any, Any, EngineThatEnds]]
    _sampler: EngineThatEnds
    restarts: int = 0
    _ends: list[float] = field(default_factory=list)
    _lost: EngineLost | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        """As the engine's; raises EngineLost once no engine is left."""
        sampler = await self._running()
        try:
            return await sampler.sample(prompt_token_ids, n, params, policy)
        except SamplerError:
            if sampler.broken is None or self._closed:
                raise
        return await (await self._running()).sample(prompt_token_ids, n, params, policy)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        """Not used: `opened` publishes to each engine."""
        raise NotImplementedError

    async def retire(self, policy: PolicyRef) -> None:
        raise NotImplementedError

    async def info(self) -> SamplerInfo:
        return await (await self._running()).info()

    async def aclose(self) -> None:
        self._closed = True
        await (await asyncio.to_thread(self.engine)).aclose()

    def engine(self) -> EngineThatEnds:
        """The engine that serves; where it has ended, the next one, once that has started. Blocks meanwhile.

        Raises EngineLost once the restarts are used up.
        """
        with self._lock:
            if (ended := self._sampler.broken) is not None and not self._closed:
                if self._lost is not None:
                    raise EngineLost(self._lost.cause, self._lost.remedy)
                self._restart(ended.cause)
            return self._sampler

    async def _running(self) -> EngineThatEnds:
        return self._sampler if self._sampler.broken is None else await asyncio.to_thread(self.engine)

    def _restart(self, cause: str) -> None:
        asyncio.run(self._sampler.aclose())
        while not self._closed:
            now = time.monotonic()
            self._ends = [at for at in self._ends if at > now - WITHIN] + [now]
            if len(self._ends) > RESTARTS:
                used_up = f"Its restarts are used up: {RESTARTS} within {WITHIN / 60:g} minutes."
                remedy = "Look at the machine's memory and at the engine's own messages above, then start again."
                self._lost = EngineLost(f"{cause} {used_up}", remedy)
                raise self._lost
            log.error("%s It is started again (%d of %d).", cause, len(self._ends), RESTARTS)
            try:
                self._sampler = asyncio.run(self.opened())
            except (CotuneError, OSError) as error:
                cause = str(error)
            else:
                self.restarts += 1
                log.warning("The engine is back.")
                return
