"""Ask the user before a search sends requests that may cost money."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from cotune.errors import ConfigError
from cotune.tables import plural
from cotune.terminal import ask_yes_no, tell

if TYPE_CHECKING:
    from cotune.trainer.prompts.options import ImproveOptions

_REMEDY = "Name a limit, --max-cost or --max-calls, or agree with --yes."


def add_yes(command: Any) -> None:
    """Add `--yes`."""
    command.add_argument("--yes", action="store_true", help="ask models without confirmation, up to max_calls")


def may_begin_search(options: ImproveOptions, *, yes: bool, has_limit: bool, app_is_local: bool) -> bool:
    """Whether the search may begin: with `yes`, if the user set a limit, if it costs nothing, or if the user at the
    terminal agrees.

    It costs nothing if all models are on this machine. `app_is_local` is whether the models of the application are.
    Raises ConfigError if there is no terminal to ask at.
    """
    if yes or has_limit or options.reflection is None:
        return True
    if app_is_local and _other_models_are_local(options):
        return True
    answering = "policies of this machine answer" if app_is_local else "the provider of the application answers"
    calls = plural(options.max_calls, "call")
    text = f"The search may make {calls} of models: {options.reflection} writes texts, and {answering}."
    if not sys.stdin.isatty():
        raise ConfigError("max_cost", None, "is missing, and there is no terminal to ask at", f"{text} {_REMEDY}")
    tell(f"{text} {_REMEDY}")
    return ask_yes_no("Go on? [y/N] ", default=False)


def _other_models_are_local(options: ImproveOptions) -> bool:
    """Whether the reflection model, and the reference of `blame` if a provider answers for it, are on this machine."""
    from cotune.integrations.web.http.requests import is_loopback

    default_url = os.environ.get("OPENAI_BASE_URL", "")
    urls = [options.reflection_url or default_url]
    if "openai:" in options.blame:
        urls.append(default_url)
    # Without an address, the client of OpenAI asks OpenAI itself.
    return all(url and is_loopback(url) for url in urls)
