"""Rewards that come after the end of an episode, perhaps days later and from another process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotune.collect.open_sink import is_collector, open_collector
from cotune.episodes.trace_sinks import FileRecords
from cotune.errors import ConfigError, WorkflowError
from cotune.recording.redaction import Redaction, Redactor, check_redactor
from cotune.recording.rewards import reward_records
from cotune.records.ids import LONGEST_KEY, TARGET, key_target
from cotune.sampling.scoring import Feedback, components, split_feedback


def feedback(
    episode: str = "",
    reward: float | Mapping[str, float] | Feedback | None = None,
    *,
    text: str = "",
    key: str = "",
    records: str | Path | None = None,
    app: str = "",
    redactor: Redactor | None = None,
) -> None:
    """Reward an episode after its end: by its id, or by the `key` that the application gave it (`cotune.trace`).

    `reward` is a number (`team`) or named numbers; `text` explains it. `records` is the address of a store or of a
    collector (default: COTUNE_COLLECTOR), `app` the application (default: COTUNE_APP). A key stands for every episode
    of the application with this key. Feedback may come before its episode, several times, and contradict itself.
    Everything is stored; for each name, the latest reward counts. Rewards for an episode that has been trained on are
    stored but change nothing. Raises ConfigError, WorkflowError unless the rewards are finite numbers, RunError.

    ```python
    with cotune.trace("production.db", key="order-17") as traced:
        graph.invoke({"question": "2 + 2"})

    cotune.feedback(key="order-17", reward=1.0, text="The customer kept it.", records="production.db")
    cotune.feedback(traced.id, 0.0, text="Sent back after all.", records="production.db")
    ```
    """
    address = records or os.environ.get("COTUNE_COLLECTOR")
    if not address:
        raise ConfigError("records", None, "is missing", "Name a store or a collector, or set COTUNE_COLLECTOR.")
    if not episode and not key:
        raise ConfigError(
            "episode", None, "is missing, and so is `key`", "Pass one of them: key=, or the id `trace.id`."
        )
    if episode and key:
        raise ConfigError("episode", episode[:100], "cannot be combined with `key`", "Pass only one of them.")
    if episode and TARGET.fullmatch(episode) is None:
        raise ConfigError("episode", episode[:100], "is not the id of an episode", "`trace.id` is. For a key use key=.")
    source = "The reward of cotune.feedback"
    value, text_of_reward = split_feedback(reward, source)
    named: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        named = value
    elif value is not None:
        named = {"team": value}
    text = text or text_of_reward
    if not named and not text:
        raise WorkflowError(f"{source} is missing.", "Pass a number, named numbers, or a text.")
    rewards = components(named, source) if named else {}
    redaction = None if redactor is None else Redaction((check_redactor(redactor),))
    app = app or os.environ.get("COTUNE_APP", "")
    target = episode or key_target(app, check_key(key))  # before the sink is opened: after an error nobody closes it
    sink = open_collector(str(address), app) if is_collector(address) else FileRecords(address)
    try:
        sink.write(reward_records(target, rewards, text, redaction=redaction))
    finally:
        if isinstance(sink, FileRecords):
            sink.close()


def check_key(key: str) -> str:
    """The application's key, if it is valid. Raises ConfigError."""
    if len(key) > LONGEST_KEY or not (key.isprintable() or not key):
        raise ConfigError("key", key[:LONGEST_KEY], f"is not a text of at most {LONGEST_KEY} printable characters")
    return key
