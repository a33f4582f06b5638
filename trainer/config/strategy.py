"""`strategy = "p, w, p"`: which stages a run has, searches for prompts (p) and trainings of weights (w)."""

from __future__ import annotations

from cotune.errors import ConfigError

STAGES = {"p": "prompts", "w": "weights"}


def stages_of(strategy: str) -> tuple[str, ...]:
    """The letters of a strategy; none for an empty one. Raises ConfigError for any other letter."""
    letters = tuple(letter.strip() for letter in strategy.split(",")) if strategy.strip() else ()
    for letter in letters:
        if letter not in STAGES:
            fault = f"has the stage {letter!r}: a stage is p, a search for prompts, or w, a training of weights"
            raise ConfigError("strategy", strategy, fault, 'For example: strategy = "p, w, p".')
    return letters
