"""Completes command lines for a shell."""

from __future__ import annotations

import argparse

import argcomplete


def complete(parser: argparse.ArgumentParser) -> None:
    """If a shell asks for completions, write them and end the process; otherwise do nothing."""
    argcomplete.autocomplete(parser)
