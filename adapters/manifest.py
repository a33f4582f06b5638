"""roles.json: the policies of an export, their bases, the role that each plays, and how to serve it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from cotune.adapters.fingerprint import BaseFingerprint, files_fault
from cotune.errors import AdapterError
from cotune.records.policies import TRAINED, LoraSpec, OtherRoles, PolicyKind
from cotune.records.structs import PolicyRef
from cotune.storage.checkpoints import checkpoint_name

MANIFEST = "roles.json"
FORMAT = 1
UNREAD = (".md", ".gitattributes", ".gitignore", ".DS_Store")
"""Endings of files that no loader reads. You may add them to an export."""
_VLLM_PORT = 8000
"""The default port of `vllm serve`. Each further server gets the next one."""
LLAMA_CPP_PORT = 8001
"""The port of the first llama-server."""


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a policy was trained from."""

    model: str
    """A folder or a Hugging Face id."""
    sha256: BaseFingerprint
    sees_images: bool = False
    tool_format: str = "auto"
    """Format of the tool calls that the model writes."""
    dtype: str | None = None
    """Precision of the base while adapters were trained on it; None if unknown."""


class ExportedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of an export."""

    name: str
    kind: PolicyKind
    version: int
    base: Base | None = None
    """None for a provider policy."""
    folder: str | None = None
    """Its folder, relative to the export; None for a policy without trained weights."""
    files: dict[str, str] = {}
    """SHA-256 of each file in its folder."""
    fingerprint: str | None = None
    """Fingerprint of the weights in memory (`cotune.sampling.protocol.fingerprint`); for a GGUF file, of the weights in
    fp32 before they were written."""
    lora: LoraSpec | None = None
    gguf: str | None = None
    """The precision of a GGUF file; None for other forms."""
    stayed: str = ""
    """The reason why no step has updated a trained policy; empty if one has."""
    step: int | None = None
    """How many steps its run had made at its checkpoint; None for a policy without a run."""

    @property
    def ref(self) -> PolicyRef:
        return PolicyRef(self.name, self.version)


class ExportedRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role, the policy that plays it, and its latest figures in training."""

    role: str
    policy: str
    metrics: dict[str, float] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of roles.json."""

    format: int
    cotune: str
    """The version of cotune that wrote it."""
    created: str
    run: str | None = None
    policies: tuple[ExportedPolicy, ...]
    roles: tuple[ExportedRole, ...]
    other_roles: OtherRoles = "provider"
    """Who answers roles that are not in `roles`: "frozen" for the untrained model `other_base`, or "provider"."""
    other_base: Base | None = None
    serve: dict[str, list[str]] = {}
    """Server -> command lines that start it; run them in the folder of the export."""
    prompts: str = ""
    """Id of the edited prompts in prompts.json, for use with the policies; empty without any."""
    trained_with: str = ""
    """Id of the prompts in training, if they differ from `prompts` (AS_WRITTEN: the application's own prompts)."""
    models: dict[str, tuple[str, ...]] = {}
    """The model names that each recorded role asked for, also roles without a policy; empty if the records could not be
    read."""
    export_version: int = 1
    """Number of this export among the exports to its folder."""
    replaced_version: int = 0
    """Number of the version that it replaced; 0 for none."""

    @property
    def title(self) -> str:
        """A title that tells versions of an export apart: `version 4 of 2026-11-29 12:30, run r1, step-000060`."""
        parts = [f"version {self.export_version} of {self.created.replace('T', ' ')[:16]}"]
        if self.run:
            parts.append(f"run {self.run}")
        steps = {policy.step for policy in self.policies if policy.step is not None}
        parts += [checkpoint_name(step) for step in sorted(steps)]
        return ", ".join(parts)

    def policy(self, role: str) -> ExportedPolicy:
        """The policy of a role. Raises AdapterError for an unknown role, with the names of all roles."""
        name = next((entry.policy for entry in self.roles if entry.role == role), None)
        policy = next((policy for policy in self.policies if policy.name == name), None)
        if policy is None:
            roles = ", ".join(entry.role for entry in self.roles)
            raise AdapterError(f"The export has no role {role!r}; it has: {roles}.", "Name one of these.")
        return policy

    @property
    def bases(self) -> list[Base]:
        """The base models of all policies and of the other roles, without duplicates."""
        bases = [*(policy.base for policy in self.policies), self.other_base]
        return list(dict.fromkeys(base for base in bases if base is not None))


def not_updated(manifest: Manifest) -> list[str]:
    """A sentence for each policy that no step has updated."""
    return [
        f"{policy.name} has no update ({policy.stayed}): its weights are those that the run started with"
        for policy in manifest.policies
        if policy.stayed
    ]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write roles.json into a folder."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


def is_export(folder: Path) -> bool:
    """Whether a folder holds a roles.json."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read and check roles.json. Raises AdapterError with the field, the value and the remedy."""
    path = folder / MANIFEST
    if not path.is_file():
        raise AdapterError(f"{folder} is no export: there is no {MANIFEST}.", "Name a folder that cotune export wrote.")
    try:
        raw: Any = msgspec.json.decode(path.read_bytes())
        if isinstance(raw, dict) and raw.get("format") != FORMAT:
            raise AdapterError(
                f"{path}: format = {raw.get('format')!r}, this cotune reads {FORMAT}.",
                "Export again with this version, or load it with the version that wrote it.",
            )
        manifest = msgspec.convert(raw, Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{path} is broken: {error}.", "Export the run again.") from None
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: Path) -> None:
    """Reject a manifest whose policies and roles contradict each other: somebody may have edited the file."""
    remedy = "Export the run again."
    names = [policy.name for policy in manifest.policies]
    for name in names:
        if names.count(name) > 1:
            raise AdapterError(f"{path}: policies: two are named {name!r}.", remedy)
    roles = [entry.role for entry in manifest.roles]
    if not roles:
        raise AdapterError(f"{path}: roles is empty.", remedy)
    for entry in manifest.roles:
        if roles.count(entry.role) > 1:
            raise AdapterError(f"{path}: roles: {entry.role!r} is there twice.", "Keep one of the two entries.")
        if entry.policy not in names:
            raise AdapterError(
                f"{path}: roles: {entry.role!r} is played by {entry.policy!r}; the policies are: {', '.join(names)}.",
                "Correct the policy of this role.",
            )
    for policy in manifest.policies:
        _check_policy(policy, path, remedy)
    if manifest.other_roles == "frozen" and manifest.other_base is None:
        raise AdapterError(f"{path}: other_roles is 'frozen' without other_base.", remedy)


def _check_policy(policy: ExportedPolicy, path: Path, remedy: str) -> None:
    """Reject a policy whose fields do not fit its kind, or whose files lie outside of the export."""
    where = f"{path}: policies: {policy.name!r}"
    if policy.kind == "lora" and policy.lora is None:
        raise AdapterError(f"{where} is a LoRA without lora.", remedy)
    if policy.kind != "provider" and policy.base is None:
        raise AdapterError(f"{where} has no base.", remedy)
    if policy.kind in TRAINED and not (policy.folder and policy.files and policy.fingerprint):
        raise AdapterError(f"{where} has no folder, files or fingerprint.", remedy)
    if policy.kind in ("frozen", "provider") and (policy.folder or policy.files or policy.fingerprint):
        raise AdapterError(f"{where} is {policy.kind} and names a folder, files or a fingerprint.", remedy)
    for name in filter(None, (policy.folder, *policy.files)):
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise AdapterError(f"{where} names {name!r}, outside the export.", remedy)


def check_files(export: Path, policy: ExportedPolicy) -> None:
    """Raise AdapterError unless the files of a policy are exactly the listed ones, unchanged, inside the export.

    Files that no loader reads may be added.
    """
    if policy.folder is None:
        return
    folder = export / policy.folder
    policy_text = f"Policy {policy.name!r}"
    real_export = export.resolve()
    # Links are checked before any file is read.
    for path in (folder, *folder.rglob("*")):
        if not path.resolve().is_relative_to(real_export):
            raise AdapterError(f"{policy_text}: {path} leads outside the export.", "Replace the link by the file.")
    if fault := files_fault(folder, policy.files, MANIFEST):
        raise AdapterError(
            f"{policy_text}: {folder}: {fault}.", "The file was changed or damaged: export the run again."
        )
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in policy.files and not name.endswith(UNREAD):
            raise AdapterError(
                f"{policy_text}: {path} is not in roles.json, but loaders of the folder may read it.",
                "Remove it, or export the run again.",
            )


def serve_commands(manifest: Manifest) -> dict[str, list[str]]:
    """Server -> command lines that start it, to be run in the folder of the export; model names are the roles."""
    roles_of_policy: dict[str, list[str]] = {policy.name: [] for policy in manifest.policies}
    for entry in manifest.roles:
        roles_of_policy[entry.policy].append(entry.role)

    # All policies of an export are GGUF files, or none. Only llama.cpp and Ollama read them.
    if any(policy.gguf for policy in manifest.policies):
        return _gguf_commands(manifest, roles_of_policy)

    # One vLLM server has all adapters of a base model; each whole model needs a server of its own.
    adapters_of_base: dict[str, list[tuple[str, ExportedPolicy]]] = {}
    for entry in manifest.roles:
        policy = manifest.policy(entry.role)
        if policy.kind == "lora" and policy.base:
            adapters_of_base.setdefault(policy.base.model, []).append((entry.role, policy))
    vllm = [_vllm_adapters_command(base, adapters) for base, adapters in adapters_of_base.items()]
    for policy in manifest.policies:
        roles = roles_of_policy[policy.name]
        if roles and policy.base and policy.kind in ("full", "frozen"):
            model = f"./{policy.folder}" if policy.folder else policy.base.model
            vllm.append(shlex.join(["vllm", "serve", model, "--served-model-name", *roles]))
    # The first server gets vLLM's default port.
    # The first server gets vLLM's default port.
    # The first server gets vLLM's default port.
    # The first server gets vLLM's default port.
    # The first server gets vLLM's default port.
    for number in range(1, len(vllm)):
        vllm[number] += f" --port {_VLLM_PORT + number}"
    return {"cotune": ["cotune serve ."], "vllm": vllm}


def _gguf_commands(manifest: Manifest, roles_of_policy: dict[str, list[str]]) -> dict[str, list[str]]:
    """The commands that serve GGUF files, by server. llama.cpp serves one file per process, on a port of its own."""
    llama_cpp = []
    ollama = []
    port = LLAMA_CPP_PORT
    for policy in manifest.policies:
        if not policy.gguf:
            continue
        roles = roles_of_policy[policy.name]
        file = shlex.quote(f"{policy.folder}/{policy.folder}.gguf")
        alias = shlex.quote(",".join(roles))
        llama_cpp.append(f"llama-server -m {file} --jinja --alias {alias} --port {port}")
        port += 1
        for role in roles:
            ollama.append(shlex.join(["ollama", "create", role, "-f", f"{policy.folder}/Modelfile"]))
    return {"llama.cpp": llama_cpp, "ollama": ollama}


def _vllm_adapters_command(base: str, adapters: list[tuple[str, ExportedPolicy]]) -> str:
    """The command that serves adapters on one base model. `adapters` are pairs of a role and its policy."""
    rank = max(policy.lora.rank for _, policy in adapters if policy.lora)
    # The ranks that vLLM accepts for --max-lora-rank.
    max_rank = next((accepted for accepted in (8, 16, 32, 64, 128, 256, 320, 512) if accepted >= rank), rank)
    modules = [f"{role}=./{policy.folder}" for role, policy in adapters]
    options = ["--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", str(max_rank)]
    return shlex.join(["vllm", "serve", base, *options, "--lora-modules", *modules])
