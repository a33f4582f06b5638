"""The options of `cotune replay`; its flags are these fields."""

from __future__ import annotations

import msgspec

from cotune.errors import ConfigError, check_bounds


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which episodes to run again, `episode` or `all`, and how. Raises ConfigError for options that do not fit."""

    episode: str | None = None
    """The episode to run again; cotune show RUN lists them."""
    all: bool = False
    """Every recorded episode. The exit status is 1 if one diverges or newly fails."""
    call: int | None = None
    """The first call that is new, by its number in cotune show --episode. Calls before it are answered from the record.
    Without this option all calls are answered from the record, or with --model none."""
    k: int = 1
    """Number of times to run it, each time with other random numbers."""
    answer: str | None = None
    """The answer at the call: a text, or an assistant message as JSON."""
    workflow: str | None = None
    """MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE of a @cotune.workflow. Default: the workflow of the run."""
    model: str | None = None
    """The run, export or untrained model (for all roles) that answers new calls. Default: the newest checkpoint of RUN.
    If it has none, the application's own provider is called and paid as usual."""
    temperature: float | None = None
    """Temperature of new calls. Default: as the application asks."""
    max_tokens: int = 256
    """Most new tokens of an answer if the application sets no limit."""
    limit: int | None = None
    """With --all, only the first N episodes."""
    concurrency: int = 8
    """Episodes in flight."""
    timeout: float = 600.0
    """Seconds for one episode."""
    out: str | None = None
    """Also write the records to this new folder."""
    roles_by: str | None = None
    prompts: str | None = None
    """File of edited prompts for new calls, or a folder that has one. Default: the edited prompts of the run. Recorded
    answers are found by the application's own prompts."""

    def __post_init__(self) -> None:
        """Check values and their combinations. Raises ConfigError."""
        if self.episode is None and not self.all:
            raise ConfigError("episode", None, "is missing", "Name one (cotune show RUN lists them), or pass --all.")
        if self.episode is not None and self.all:
            raise ConfigError("episode", self.episode, "cannot be used with --all", "Leave one of them out.")
        if self.all and (self.answer is not None or self.k != 1):
            name = "answer" if self.answer is not None else "k"
            raise ConfigError(
                name, getattr(self, name), "cannot be used with --all", "Name one episode with --episode."
            )
        if self.answer is not None and (self.call is None or self.k != 1):
            raise ConfigError(
                "answer", self.answer, "needs --call, and cannot be used with -k", "Name the call that it answers."
            )
        check_bounds(self, "k", "limit", "max_tokens", "concurrency", "timeout")
