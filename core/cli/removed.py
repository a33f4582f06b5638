"""Flags that earlier versions had, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REMOVED_FLAGS: Mapping[str, str] = {
    "check --answer": "Use --answers: a small model, provider, or records:ADDRESS (what cotune trace recorded).",
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
