"""Answers a shell that asks what may come next on a command line."""

from __future__ import annotations

import argparse

import argcomplete


def complete(parser: argparse.ArgumentParser) -> None:
    """Write what fits to the shell, and end the process; does nothing where no shell asks."""
    argcomplete.autocomplete(parser)
