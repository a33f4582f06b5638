"""`cotune serve`."""

from __future__ import annotations

import argparse

from cotune.cli.command import (
    Parser,
    add_address,
    add_fields,
    add_moved,
    add_prompts,
    add_records,
    add_repeated,
    fields_of,
    parse_moved_models,
    parse_pairs,
)
from cotune.terminal import tell

EXAMPLE = "cotune serve adapters/ --port 8000"
EXTRA = "train"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune serve`."""
    from cotune.integrations.web.http.limits import BodyLimits

    command.add_argument("source", metavar="DIR", help="export, or model: folder, GGUF file or Hugging Face id")
    add_address(command, port=8000)
    add_moved(command, "export")
    add_repeated(command, "--role", "NAME", "additional model name for a plain model")
    text = "answer for this model name too, by the role: --as gpt-4o-mini=planner"
    add_repeated(command, "--as", "NAME=ROLE", text, dest="aliases")
    command.add_argument(
        "--default",
        metavar="POLICY",
        default="",
        help="policy that answers all other model names, or base: the untrained model "
        "(default: none, unless one policy played every role)",
    )
    add_fields(command, "max_body", table=BodyLimits)
    command.add_argument(
        "--tool-format",
        metavar="FORMAT",
        help="how the model writes tool calls: auto, hermes, qwen3_coder, mistral, mistral_v11, llama3_json, or "
        "vllm:NAME for a tool parser of vLLM (default: as exported, or auto: as its chat template does)",
    )
    add_prompts(command, "what the export was trained with")
    add_records(command)
    command.add_argument(
        "--redact", metavar="MODULE:FUNCTION", help="change messages by this function before they are recorded"
    )


def run(a: argparse.Namespace) -> int:
    """Serve an export or a run with OpenAI's API, a model name for each role."""
    tell(f"loading {a.source} ...")
    from cotune.adapters.serving import serve
    from cotune.recording.redaction import load_redactor

    serve(
        a.source,
        host=a.host,
        port=a.port,
        token=a.token,
        model=parse_moved_models(a.model),
        names=a.role,
        aliases=parse_pairs("--as", a.aliases, "NAME=ROLE", "For example: --as gpt-4o-mini=planner"),
        default=a.default,
        tool_format=a.tool_format,
        prompts=a.prompts,
        any_prompts=a.any_prompts,
        records=a.records,
        app=a.app,
        redactor=load_redactor(a.redact) if a.redact else None,
        **fields_of(a),
    )
    return 0
