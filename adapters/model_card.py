"""The README.md of an export, and the command lines that serve it."""

from __future__ import annotations

import shlex

from cotune.adapters.manifest import ExportedPolicy, ExportedRole, Manifest


def serve_commands(manifest: Manifest) -> dict[str, list[str]]:
    """Command lines by server, to be run in the folder of the export; model names are the roles."""
    vllm: list[str] = []
    adapters: dict[str, list[tuple[ExportedRole, ExportedPolicy]]] = {}
    for entry in manifest.roles:
        policy = manifest.policy(entry.role)
        if policy.kind == "lora" and policy.base:
            adapters.setdefault(policy.base.model, []).append((entry, policy))
    for base, played in adapters.items():
        vllm.append(_vllm_adapters(base, played))
    for policy in manifest.policies:
        names = [entry.role for entry in manifest.roles if entry.policy == policy.name]
        if names and policy.base and policy.kind in ("full", "frozen"):
            model = f"./{policy.folder}" if policy.folder else policy.base.model
            vllm.append(shlex.join(["vllm", "serve", model, "--served-model-name", *names]))
    return {"cotune": ["cotune serve ."], "vllm": vllm}


def _vllm_adapters(base: str, played: list[tuple[ExportedRole, ExportedPolicy]]) -> str:
    rank = max(policy.lora.rank for _, policy in played if policy.lora)
    ceiling = next((r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= rank), rank)
    modules = [f"{entry.role}=./{policy.folder}" for entry, policy in played]
    options = ["--enable-lora", "--max-loras", str(len(played)), "--max-lora-rank", str(ceiling)]
    return shlex.join(["vllm", "serve", base, *options, "--lora-modules", *modules])


def model_card(manifest: Manifest) -> str:
    """A short model card in Markdown."""
    bases = list(dict.fromkeys(policy.base.model for policy in manifest.policies if policy.base))
    lora = any(policy.kind == "lora" for policy in manifest.policies)
    head = ["---", *(f"base_model: {base}" for base in bases[:1])]
    head += ["library_name: peft" if lora else "library_name: transformers", "tags: [cotune, reinforcement-learning]"]
    rows = [_row(manifest, entry) for entry in manifest.roles]
    commands = "\n".join(manifest.serve["vllm"])
    vllm = f"\nWith vLLM (one server per line):\n\n```\n{commands}\n```\n" if commands else ""
    return f"""{chr(10).join(head)}
---

# Role policies{f" of run {manifest.run}" if manifest.run else ""}

| role | policy | version | kind | folder | base | weights SHA-256 |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Model names of a server are the roles; `roles.json` holds hashes, versions and metrics. In this folder:

```
cotune serve .
```
{vllm}
In process, around an unchanged application:

```python
with cotune.deployed("PATH/TO/THIS/FOLDER"):
    graph.invoke(...)
```
"""


def _row(manifest: Manifest, entry: ExportedRole) -> str:
    policy = manifest.policy(entry.role)
    digest = next(iter(policy.files.values()), "")[:12]
    base = policy.base.model if policy.base else "the application's own provider"
    cells = (entry.role, policy.name, str(policy.version), policy.kind, policy.folder or "", base, digest)
    return f"| {' | '.join(cells)} |"
