"""The options of `cotune blame`; its flags are these fields."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from cotune.errors import ConfigError, check_bounds
from cotune.records.prices import Prices
from cotune.storage.open_store import is_path
from cotune.trainer.evaluation.modes import check_temperature

FAILED = "failed"
"""The value of `episodes` that takes the failed runs of the analysis itself."""


class BlameOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is swapped, and what may be spent. Raises ConfigError for values that do not fit."""

    references: tuple[str, ...] = ()
    """What answers in place of a role: openai:NAME (a model at the OpenAI-compatible address of the environment), a
    model, a run or an export on this machine, or prompts:FOLDER (the same model with edited prompts). ROLE=... for one
    role alone."""
    without: tuple[str, ...] = ()
    """Test whether a role earns its place: it answers nothing, or with ROLE=TEXT always this text."""
    episodes: str | None = None
    """Find the call that lost an episode: failed (the worst failed runs of the application as it is), the id of one of
    its runs in the folder, or recorded episodes (a run, records or a database): the failed ones, in place of tasks."""
    out: str = "runs/blame"
    """Folder of the analysis. The same command continues it."""
    max_calls: int | None = None
    """Maximum number of model calls. A larger number continues the analysis."""
    max_cost: float | None = None
    """Maximum cost, at the given prices and in their currency."""
    prices: Prices = {}
    """Money for a million prompt tokens and a million completion tokens, by model."""
    limit: int = 20
    """Maximum number of tasks, drawn at random from the file."""
    runs: int = 30
    """Maximum number of runs of the application on each task."""
    model: str | None = None
    """Run, export or untrained model that answers for the application as it is (default: its own provider)."""
    temperature: float | None = None
    """Temperature of every answer (default: as the application asks). The application's own model is then asked at the
    OpenAI-compatible address of the environment."""
    tools: Literal["recorded", "run"] = "recorded"
    """A framework's tools where a run repeats another one: recorded (they return what they returned there) or run (they
    run again)."""
    max_tokens: int = 1024
    """Maximum number of tokens in an answer of a model on this machine, if the application sets no limit."""
    concurrency: int = 8
    """Episodes in flight."""
    timeout: float = 600.0
    """Seconds for one episode."""
    roles_by: str | None = None
    """What names the roles: caller | model | module:function."""
    seed: int = 0
    """Of the draw of tasks, and of answers of models on this machine."""

    @property
    def records(self) -> str | None:
        """The address of the recorded episodes that `episodes` names; None if it names none."""
        named = self.episodes
        if named is None or named == FAILED:
            return None
        return named if not is_path(named) or Path(named).exists() else None

    def __post_init__(self) -> None:
        """Check the limits and the combination of options. Raises ConfigError."""
        check_temperature(self.temperature)
        check_bounds(self, "max_calls", "max_cost", "limit", "runs", "max_tokens", "concurrency", "timeout")
        if self.references and self.without:
            fault = "cannot be used with without (--without)"
            raise ConfigError("references", ", ".join(self.references), fault, "Ask one question after the other.")
        if self.episodes is not None and (self.references or self.without):
            fault = "cannot be used with a reference or without (--without)"
            raise ConfigError("episodes", self.episodes, fault, "Ask one question after the other.")
        if self.max_cost is not None and not self.prices:
            example = "For example: --price gpt-5=1.25/10 --max-cost 5"
            raise ConfigError("max_cost", self.max_cost, "needs prices", example)


def split_reference(text: str) -> tuple[str, str]:
    """The role ("" for all roles) and the source of one --reference: [ROLE=]SOURCE."""
    role, equals, source = text.partition("=")
    # A path or an address may have an equals sign too, but not before its first slash or colon.
    if not equals or "/" in role or ":" in role:
        return "", text
    return role, source


def provider_model(text: str) -> str | None:
    """The model that a reference asks a provider for; None if it answers in another way."""
    kind, _, name = split_reference(text)[1].partition(":")
    return name if kind == "openai" else None
