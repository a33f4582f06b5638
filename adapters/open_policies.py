"""Opens trained policies in this process: an export or a plain model, its sampler and its chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cotune.adapters.fingerprint import base_fingerprint
from cotune.adapters.load import Export, load_export
from cotune.adapters.manifest import is_export
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.chat.template import ChatTemplate
from cotune.integrations.chat.tool_formats import AUTO, check_tool_format
from cotune.integrations.models.folder import locate_model
from cotune.policies import stand_in
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import ChatFormat, Sampler


@dataclass(frozen=True)
class ServedModel:
    """One model name and what answers for it. `base` is the folder or id of the base model, `base_sha256` its
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

    `token_text` gives the text of one token id. `others` answers for any role or name that is not listed; None leaves
    it to its provider.
    """

    sampler: Sampler
    chat: ChatFormat
    served: Mapping[str, ServedModel]
    left_to_provider: Sequence[str]
    max_model_len: int
    token_text: Callable[[int], str]
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

    `tool_format` is how the model writes tool calls; None for what the export says, or "auto".
    Raises AdapterError, ConfigError, SyncError before anything is served.
    """
    check_tool_format(tool_format or AUTO)
    if is_export(Path(source)):
        if names:
            raise ConfigError("role", names[0], "no --role with an export: it names its own", "Leave --role out.")
        return await _open_export(load_export(source, base), tool_format)
    return await _open_model(source, base, names, tool_format)


def with_aliases(local: LocalPolicies, aliases: Mapping[str, str]) -> LocalPolicies:
    """The same under further names: what is asked of a name in `aliases` is answered by the role beside it.

    Raises ConfigError for a role that is not served, and a name that is.
    """
    for name, role in aliases.items():
        if role not in local.served:
            raise ConfigError("as", f"{name}={role}", f"NAME=ROLE with one of the roles {', '.join(local.served)}")
        if name in local.served:
            raise ConfigError("as", f"{name}={role}", "a name that is not served already", "Leave it out.")
    return replace(local, served={**local.served, **{name: local.served[role] for name, role in aliases.items()}})


async def _open_export(export: Export, tool_format: str | None) -> LocalPolicies:
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
    base = next(policy.base for policy in export.manifest.policies if policy.base)
    if (untrained := stand_in(export.manifest.other_roles)) is None:
        return local
    digest = base.sha256.weights
    return replace(local, others=ServedModel("any other", untrained, "frozen", base.model, digest, digest))


async def _open_model(
    source: str | Path, base: str | Path | None, names: Sequence[str], tool_format: str | None
) -> LocalPolicies:
    if base is not None:
        raise ConfigError("model", str(base), "no --model with a plain model: it is the base itself", "Leave it out.")
    folder = locate_model(source)
    digest = base_fingerprint(folder).weights
    own = folder.name if Path(source).expanduser().exists() else str(source)
    policy = PolicyRef("base", 0)
    served = {
        name: ServedModel(name, policy, "frozen", str(source), digest, digest) for name in dict.fromkeys([own, *names])
    }
    return await _open(folder, served, [], tool_format or AUTO)


async def _open(
    model: Path,
    served: Mapping[str, ServedModel],
    left: Sequence[str],
    tool_format: str,
    export: Export | None = None,
) -> LocalPolicies:
    from cotune.adapters.restarting import Restarting
    from cotune.integrations.samplers.transformers.sampler import TransformersSampler

    async def opened() -> TransformersSampler:
        sampler = await TransformersSampler.open(model)
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
        sampler = await starting
        info = await sampler.info()
    except BaseException:
        await (await starting).aclose()
        raise
    return LocalPolicies(
        Restarting(opened, sampler),
        chat,
        served,
        left,
        info.max_model_len,
        lambda token: chat.tokenizer.decode([token]),
    )
