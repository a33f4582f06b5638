"""`cotune gateway`."""

from __future__ import annotations

import argparse
import os

from cotune.cli.command import Parser, add_address, add_fields, add_records, fields_of
from cotune.terminal import tell

EXAMPLE = "cotune gateway --upstream https://api.openai.com/v1"
EXTRA = "gateway"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune gateway`."""
    from cotune.integrations.web.http.limits import Limits

    command.add_argument("--upstream", required=True, metavar="URL", help="base URL of the provider's OpenAI API")
    command.add_argument(
        "--anthropic-upstream",
        metavar="URL",
        help="base URL for Anthropic's Messages API, such as https://api.anthropic.com/v1 (default: --upstream)",
    )
    add_records(command, default="runs/gateway")
    add_address(command, port=8100)
    command.add_argument(
        "--roles-by",
        metavar="WHO",
        help="MODULE:FUNCTION or FILE.py:FUNCTION that names the role of a call from its messages, model and tools; or "
        "model, to use the name of the requested model; see docs/how-to/roles.md",
    )
    command.add_argument(
        "--prompts", metavar="FILE", help="prompts.json, or a folder that has one: calls are sent with these prompts"
    )
    command.add_argument(
        "--role-header", default="", metavar="NAME", help="header of the application's requests that names the role"
    )
    command.add_argument(
        "--episode-by",
        choices=("connection",),
        help="put calls that name no episode into one episode for each connection",
    )
    command.add_argument(
        "--episode-header",
        default="",
        metavar="NAME",
        help="put calls that name no episode into one episode for each value of this header",
    )
    command.add_argument(
        "--episode-idle",
        type=float,
        metavar="SECONDS",
        help="end an episode after this time without a call (default with --episode-header: 300). Without this flag "
        "and --episode-by and --episode-header, all calls that name no episode belong to one episode",
    )
    add_fields(command, "max_body", "timeout", table=Limits)
    text = "module:function or file.py:function that gets each message before it is stored and returns what to store"
    add_fields(command, "redact", redact=f"{text}; see docs/how-to/privacy.md")


def run(a: argparse.Namespace) -> int:
    """Start the gateway: a proxy for model providers that records the calls which pass through it.

    Keys of providers come from the environment only, because arguments of a process are visible to other users.
    """
    from cotune.episodes.workflows import load_roles
    from cotune.integrations.web.gateway.server import serve
    from cotune.integrations.web.gateway.settings import GatewayConfig, Split
    from cotune.integrations.web.http.limits import Limits
    from cotune.prompts.file import read_prompts
    from cotune.recording.redaction import load_redactor

    config = GatewayConfig(
        upstream=a.upstream,
        key=os.environ.get("COTUNE_UPSTREAM_KEY"),
        token=a.token or os.environ.get("COTUNE_TOKEN"),
        app=a.app,
        limits=Limits(**fields_of(a, Limits)),
        anthropic=a.anthropic_upstream,
        anthropic_key=os.environ.get("COTUNE_ANTHROPIC_KEY"),
        roles=load_roles(a.roles_by) if a.roles_by else None,
        role_header=a.role_header,
        split=Split(by=a.episode_by, header=a.episode_header, idle=a.episode_idle),
        prompts=read_prompts(a.prompts) if a.prompts else None,
        redactors=[load_redactor(a.redact)] if a.redact else [],
    )
    serve(config, a.records, tell, host=a.host, port=a.port)
    return 0
