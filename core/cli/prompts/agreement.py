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


def may_begin_search(options: ImproveOptions, *, yes: bool, limited: bool, here: bool) -> bool:
    """Whether the search may begin.

    It may with `yes`, with a limit of the user's (`limited`), and if all models are on this machine (`here`: the models
    of the application are). Otherwise the user at the terminal is asked. Raises ConfigError without a terminal.
    """
    costs_nothing = options.reflection is None or (here and _on_this_machine(options))
    if yes or limited or costs_nothing:
        return True
    answering = "policies of this machine answer" if here else "the provider of the application answers"
    calls = plural(options.max_calls, "call")
    text = f"The search may make {calls} of models: {options.reflection} writes texts, and {answering}."
    if not sys.stdin.isatty():
        raise ConfigError("max_cost", None, "is missing, and there is no terminal to ask at", f"{text} {_REMEDY}")
    tell(f"{text} {_REMEDY}")
    return ask_yes_no("Go on? [y/N] ", default=False)


def _on_this_machine(options: ImproveOptions) -> bool:
    """Whether the reflection model and the reference are on this machine."""
    from cotune.integrations.web.http.requests import is_loopback

    address = os.environ.get("OPENAI_BASE_URL", "")
    url = options.reflection_url or address
    # A reference of `blame` that a provider answers for is at the address of the environment.
    elsewhere = "openai:" in options.blame and not (address and is_loopback(address))
    return bool(url) and is_loopback(url) and not elsewhere
