"""roles.json: the policies of an export, their bases, the role that each plays, and how to serve it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import msgspec

from cotune.adapters.fingerprint import BaseFingerprint, changed
from cotune.errors import AdapterError
from cotune.records.policies import TRAINED, LoraSpec, OtherRoles, PolicyKind
from cotune.records.structs import PolicyRef
from cotune.storage.checkpoints import checkpoint_name

MANIFEST = "roles.json"
FORMAT = 1
UNREAD = (".md", ".gitattributes", ".gitignore", ".DS_Store")
"""Ends of names of files that no loader reads: they may be added to an export."""
_VLLM_PORT = 8000
"""The port of `vllm serve` without one; each further server has the next one."""


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a policy was trained from: a folder or a Hugging Face id, its fingerprint, whether it reads
    images, how it writes tool calls, and the precision in which adapters on it were trained, as far as it is known."""

    model: str
    sha256: BaseFingerprint
    sees_images: bool = False
    tool_format: str = "auto"
    dtype: str | None = None


class ExportedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy of an export.

    `folder` is relative to the export; None for policies without trained weights. `files` maps all files in it to
    their SHA-256, `fingerprint` is that of the weights in memory (`cotune.sampling.protocol.fingerprint`). `base` is
    None for a provider policy. `gguf` is the precision of a policy that is a GGUF file; the fingerprint is then that of
    the weights in fp32 which it was made from. `stayed` says why no step has updated a trained policy; empty where one
    has. `step` is how many steps its checkpoint had made, if it was trained in a run.
    """

    name: str
    kind: PolicyKind
    version: int
    base: Base | None = None
    folder: str | None = None
    files: dict[str, str] = {}
    fingerprint: str | None = None
    lora: LoraSpec | None = None
    gguf: str | None = None
    stayed: str = ""
    step: int | None = None

    @property
    def ref(self) -> PolicyRef:
        return PolicyRef(self.name, self.version)


class ExportedRole(msgspec.Struct, frozen=True, kw_only=True):
    """A role, the policy that plays it, and its latest figures in training."""

    role: str
    policy: str
    metrics: dict[str, float] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of roles.json. `serve` holds command lines by server, to be run in the folder of the export;
    `other_roles` plays a role that is not among `roles`: if that is the untrained model, `other_base`. `prompts` is the
    id of the edited prompts beside it (prompts.json), with which the policies are used; empty without any.
    `trained_with` is the id of those that they were trained with, where it is another (AS_WRITTEN: the application's
    own). `export_version` counts the exports to its folder, and `replaced_version` is the one that it replaced (0 for
    none). `models` has the model names that each recorded role asked for, also roles that no policy plays; it is empty
    where the records are not known."""

    format: int
    cotune: str
    created: str
    run: str | None = None
    policies: tuple[ExportedPolicy, ...]
    roles: tuple[ExportedRole, ...]
    other_roles: OtherRoles = "provider"
    other_base: Base | None = None
    serve: dict[str, list[str]] = {}
    prompts: str = ""
    trained_with: str = ""
    models: dict[str, tuple[str, ...]] = {}
    export_version: int = 1
    replaced_version: int = 0

    @property
    def title(self) -> str:
        """Which of the exports to its folder this is: `version 4 of 2026-11-29 12:30, run r1, step-000060`."""
        steps = sorted({policy.step for policy in self.policies if policy.step is not None})
        title = f"version {self.export_version} of {self.created.replace('T', ' ')[:16]}"
        run = [f"run {self.run}"] if self.run else []
        return ", ".join([title, *run, *map(checkpoint_name, steps)])

    def policy(self, role: str) -> ExportedPolicy:
        """The policy of a role. Raises AdapterError for an unknown one, with the roles there are."""
        name = next((entry.policy for entry in self.roles if entry.role == role), None)
        found = next((policy for policy in self.policies if policy.name == name), None)
        if found is None:
            known = ", ".join(entry.role for entry in self.roles)
            raise AdapterError(f"The export has no role {role!r}; it has: {known}.", "Name one of these.")
        return found

    @property
    def bases(self) -> list[Base]:
        """The models that it needs or was trained from, each once."""
        named = [*(policy.base for policy in self.policies), self.other_base]
        return list(dict.fromkeys(base for base in named if base is not None))


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
    """Read and check roles.json. Raises AdapterError naming the field, the value and the remedy."""
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
    added = sorted(name for name in names if name not in policy.files and not name.endswith(UNREAD))
    if added:
        raise AdapterError(
            f"{where}: {folder / added[0]} is not in roles.json, but loaders of the folder may read it.",
            "Remove it, or export the run again.",
        )


def serve_commands(manifest: Manifest) -> dict[str, list[str]]:
    """Command lines by server, to be run in the folder of the export; model names are the roles."""
    files = [policy for policy in manifest.policies if policy.gguf]
    if files:
        roles = {policy.name: [e.role for e in manifest.roles if e.policy == policy.name] for policy in files}
        return {
            "llama.cpp": [
                f"llama-server -m {shlex.quote(f'{policy.folder}/{policy.folder}.gguf')} --jinja "
                f"--alias {shlex.quote(','.join(roles[policy.name]))} --port {port}"
                for port, policy in enumerate(files, start=8001)
            ],
            "ollama": [
                shlex.join(["ollama", "create", role, "-f", f"{policy.folder}/Modelfile"])
                for policy in files
                for role in roles[policy.name]
            ],
        }
    adapters: dict[str, list[tuple[ExportedRole, ExportedPolicy]]] = {}
    for entry in manifest.roles:
        policy = manifest.policy(entry.role)
        if policy.kind == "lora" and policy.base:
            adapters.setdefault(policy.base.model, []).append((entry, policy))
    vllm = [_vllm_adapters(base, played) for base, played in adapters.items()]
    for policy in manifest.policies:
        names = [entry.role for entry in manifest.roles if entry.policy == policy.name]
        if names and policy.base and policy.kind in ("full", "frozen"):
            model = f"./{policy.folder}" if policy.folder else policy.base.model
            vllm.append(shlex.join(["vllm", "serve", model, "--served-model-name", *names]))
    ports = ["", *(f" --port {_VLLM_PORT + number}" for number in range(1, len(vllm)))]
    return {"cotune": ["cotune serve ."], "vllm": [command + port for command, port in zip(vllm, ports, strict=False)]}


def _vllm_adapters(base: str, played: list[tuple[ExportedRole, ExportedPolicy]]) -> str:
    rank = max(policy.lora.rank for _, policy in played if policy.lora)
    ceiling = next((r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= rank), rank)
    modules = [f"{entry.role}=./{policy.folder}" for entry, policy in played]
    options = ["--enable-lora", "--max-loras", str(len(played)), "--max-lora-rank", str(ceiling)]
    return shlex.join(["vllm", "serve", base, *options, "--lora-modules", *modules])
