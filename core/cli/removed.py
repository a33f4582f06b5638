"""Commands and flags that earlier versions had, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REMOVED_COMMANDS: Mapping[str, str] = {
    "judge": "Use cotune records judge.",
    "report": "Use cotune show RUN --html FILE.",
    "runs": "Use cotune show FOLDER.",
    "score": "Use cotune records score.",
    "sft": "Use cotune records sft.",
}
"""By command, a sentence that tells the user what to do."""

_SEARCH_FIRST = "Run cotune prompts improve, which has it, then cotune train --prompts FOLDER."

REMOVED_FLAGS: Mapping[str, str] = {
    "check --answer": "Use --answers: a small model, provider, or records:ADDRESS (what cotune trace recorded).",
    "trace --record-tools": "Use --record tools.",
    "trace --freeze": "Use --record frozen.",
    "export --best": "Use --step best.",
    "train --strategy": "Run cotune prompts improve, then cotune train --prompts FOLDER; see docs/how-to/prompts.md.",
    "train --reflection": _SEARCH_FIRST,
    "train --reflection-url": _SEARCH_FIRST,
    "train --reflection-key-env": _SEARCH_FIRST,
    "train --max-calls": _SEARCH_FIRST,
    "train --max-cost": _SEARCH_FIRST,
    "train --price": _SEARCH_FIRST,
    "train --yes": _SEARCH_FIRST,
}
"""By command and flag, a sentence that tells the user what to do. Add a row when you remove a flag."""


def removed_flag(command: str, words: Sequence[str]) -> str:
    """The error for the first of a command's words that is a removed flag, or an empty text.

    It is asked before argparse reads the line, which may take a removed flag for the abbreviation of another one.
    """
    for word in words:
        if word == "--":  # only positional arguments follow
            break
        flag = word.partition("=")[0]
        if remedy := REMOVED_FLAGS.get(f"{command} {flag}"):
            return f"{flag} was removed. {remedy}"
    return ""
