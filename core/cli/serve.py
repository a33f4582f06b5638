"""The commands that hand over and answer: `cotune export`, `serve` and `gateway`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from cotune.cli.command import add_address, add_command, add_repeated, add_trust, pairs
from cotune.cli.fields import add_fields, given
from cotune.storage.checkpoints import newest_checkpoint, read_best, steps_of
from cotune.storage.run_layout import RunLayout, read_run, read_run_json
from cotune.terminal import tell

_UNTRAINED = {"frozen": "frozen, the base model answers", "provider": "the application's own provider"}


def add_export(commands: Any) -> None:
    """Add `cotune export`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.adapters.export import export_run
        from cotune.adapters.manifest import not_updated
        from cotune.integrations.models.folder.hub import check_repository, push, push_again

        if a.push:
            check_repository(a.push)
        form = {"merge": a.merge, "gguf": a.gguf, "evaluation": a.evaluation, "model": a.model}
        manifest = export_run(a.run_folder, a.to, best=a.best, **form)
        checkpoint, steps = newest_checkpoint(RunLayout(a.run_folder).checkpoints), read_run(a.run_folder).config.steps
        done = 0 if checkpoint is None else steps_of(checkpoint)
        kinds = {entry.role: manifest.policy(entry.role).kind for entry in manifest.roles}
        trained = sorted(role for role, kind in kinds.items() if kind in ("lora", "full"))
        tell(f"exported {', '.join(trained)} to {a.to}")
        if a.best:
            kept = read_best(RunLayout(a.run_folder).checkpoints)
            tell("best: " + ", ".join(f"{name} of {b.checkpoint} ({b.figure:.3f})" for name, b in sorted(kept.items())))
            for name in sorted({manifest.policy(role).name for role in trained} - kept.keys()):
                tell(f"{name} has no best checkpoint, as no evaluation judged it: this is its newest one")
        elif steps is not None and done < steps:
            tell(f"the run is not finished: this is step {done} of {steps}")
        for text in not_updated(manifest):
            tell(text)
        for role in sorted(kinds.keys() - set(trained)):
            tell(f"no folder for {role}: its policy is {_UNTRAINED[kinds[role]]}")
        if loggers := (read_run_json(a.run_folder).get("config") or {}).get("loggers"):
            from cotune.trainer.reporting.loggers import send_export

            tell(f"sending the export to {', '.join(loggers)} ...")
            send_export(Path(a.run_folder), Path(a.to), tell)
        if a.push:
            try:
                tell(f"pushed to {push(Path(a.to), a.push, private=a.private)}")
            except KeyboardInterrupt:
                tell(f"{a.to} is whole, but {a.push} may lack it: {push_again(Path(a.to), a.push)}")
                raise
        how = "README.md there has the commands for llama.cpp and Ollama" if a.gguf else f"cotune serve {a.to}"
        tell(f"next: {how}")
        return 0

    text = "write the trained policies as PEFT folders (or models) with roles.json and a model card"
    command = add_command(commands, "export", run, text, "cotune export runs/r1 --to adapters/", extra="train")
    add_trust(command)
    command.add_argument("run_folder", metavar="RUN", help="run folder")
    command.add_argument("--to", required=True, metavar="DIR", help="folder to write; must be empty, new, or an export")
    command.add_argument("--model", metavar="BASE", help="base model, where it lies elsewhere than the run says")
    command.add_argument(
        "--best", action="store_true", help="the best checkpoint by held-out evaluation (evaluation.keep_best)"
    )
    command.add_argument(
        "--merge", action="store_true", help="add each adapter to its base model: a whole model for each policy"
    )
    command.add_argument(
        "--gguf",
        nargs="?",
        const="f16",
        choices=("f16", "bf16", "f32", "q8_0"),
        help="the same as one GGUF file each, for llama.cpp, Ollama and LM Studio, in this precision (default: f16)",
    )
    command.add_argument(
        "--evaluation",
        metavar="DIR",
        help="folder that cotune eval --out wrote: its figures go into the README (default: the newest one in RUN)",
    )
    command.add_argument("--push", metavar="USER/NAME", help="then upload the folder to the Hugging Face Hub")
    command.add_argument("--private", action="store_true", help="make that repository a private one, where it is new")


def add_serve(commands: Any) -> None:
    """Add `cotune serve`."""
    from cotune.integrations.web.http.limits import BodyLimits

    def run(a: argparse.Namespace) -> int:
        tell(f"loading {a.folder} ...")
        from cotune.adapters.serving import serve

        token = a.token or os.environ.get("COTUNE_TOKEN")
        limits = BodyLimits(**given(a))
        options = {"base": a.model, "names": a.role, "tool_format": a.tool_format, "limits": limits}
        aliases = pairs("--as", a.alias, "NAME=ROLE", "For example: --as gpt-4o-mini=planner")
        serve(a.folder, tell, host=a.host, port=a.port, token=token, aliases=aliases, **options)
        return 0

    text = "serve an export (or a plain model) over an OpenAI-compatible API, one model name per role"
    command = add_command(commands, "serve", run, text, "cotune serve adapters/ --port 8000", extra="train")
    add_trust(command)
    command.add_argument("folder", metavar="DIR", help="export, or model: folder, GGUF file or Hugging Face id")
    add_address(command, port=8000)
    command.add_argument("--model", metavar="BASE", help="base model, where it lies elsewhere than the export says")
    add_repeated(command, "--role", "NAME", "further model name for a plain model")
    text = "answer for this model name too, by the role: --as gpt-4o-mini=planner"
    add_repeated(command, "--as", "NAME=ROLE", text, dest="alias")
    add_fields(command, *BodyLimits.__struct_fields__, table=BodyLimits)
    command.add_argument(
        "--tool-format",
        metavar="FORMAT",
        help="how the model writes tool calls: auto, hermes, qwen3_coder, mistral, mistral_v11, llama3_json, or "
        "vllm:NAME for a tool parser of vLLM (default: as exported, or auto: as its chat template does)",
    )


def add_gateway(commands: Any) -> None:
    """Add `cotune gateway`."""
    from cotune.integrations.web.http.limits import Limits

    def run(a: argparse.Namespace) -> int:
        from cotune.episodes.workflows import load_roles
        from cotune.integrations.web.gateway.server import serve
        from cotune.integrations.web.gateway.settings import GatewayConfig, Split
        from cotune.recording.redaction import load_redactor

        config = GatewayConfig(
            upstream=a.upstream,
            key=os.environ.get("COTUNE_UPSTREAM_KEY"),
            token=a.token or os.environ.get("COTUNE_TOKEN"),
            limits=Limits(**given(a)),
            anthropic=a.anthropic_upstream,
            anthropic_key=os.environ.get("COTUNE_ANTHROPIC_KEY"),
            roles=load_roles(a.roles_by) if a.roles_by else None,
            role_header=a.role_header,
            split=Split(by=a.episode_by, header=a.episode_header, idle=a.episode_idle),
            redactors=[load_redactor(a.redact)] if a.redact else [],
        )
        serve(config, a.records, tell, host=a.host, port=a.port)
        return 0

    text = "record applications in other processes and languages, between them and their provider"
    example = "cotune gateway --upstream https://api.openai.com/v1"
    command = add_command(commands, "gateway", run, text, example, extra="gateway")
    command.add_argument("--upstream", required=True, metavar="URL", help="base URL of the provider's OpenAI API")
    command.add_argument(
        "--anthropic-upstream",
        metavar="URL",
        help="base URL for Anthropic's Messages API, such as https://api.anthropic.com/v1 (default: --upstream)",
    )
    command.add_argument(
        "--records", default="runs/gateway", metavar="PATH", help="folder or records file (default: %(default)s)"
    )
    add_address(command, port=8100)
    _add_identity(command)
    add_fields(command, "redact")
    add_fields(command, *Limits.__struct_fields__, table=Limits)


def _add_identity(command: Any) -> None:
    """How the gateway tells the roles and episodes of an application that names none."""
    command.add_argument(
        "--roles-by",
        metavar="WHO",
        help="MODULE:FUNCTION or FILE.py:FUNCTION that names the role of a call from its messages, model and tools; or "
        "model, for the name of the model that it asks; see docs/how-to/roles.md",
    )
    command.add_argument(
        "--role-header", default="", metavar="NAME", help="a header of the application's that says the role"
    )
    command.add_argument(
        "--episode-by", choices=("connection",), help="calls that name no episode: one for each connection"
    )
    command.add_argument(
        "--episode-header", default="", metavar="NAME", help="the same: one for each value of this header"
    )
    command.add_argument(
        "--episode-idle",
        type=float,
        metavar="SECONDS",
        help="an episode ends after so long without a call (default with --episode-header: 300); alone, one at a time",
    )
