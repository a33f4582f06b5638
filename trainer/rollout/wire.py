"""The messages between the driver and its rollout workers."""

from __future__ import annotations

from typing import Any

import msgspec

from cotune.episodes.episode import EpisodeOptions
from cotune.records.structs import Task
from cotune.replay.script import Replay
from cotune.trainer.rollout.app_source import AppSource
from cotune.trainer.run.episode_runner import ResponderConfig


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The application and the models of a worker."""

    app: AppSource
    sampler: Any = None
    """A Sampler that can be sent to other processes, such as RaySampler; None leaves all calls to the application's
    provider."""
    bases: dict[str, list[str]] = {}
    """Base models (folders or ids), the run's own first, each with its policies. Workers use their chat templates."""
    tool_formats: dict[str, str] = {}
    """The tool format of each base model."""
    run_folder: str | None = None
    """Folder of the run, if it has one."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a worker that is ready: facts of the workflow that it has imported."""

    workflow: str
    scorers: tuple[str, ...]
    redactors: int


class EpisodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to run. With a `replay` it repeats a recorded episode."""

    id: str
    task: Task
    options: EpisodeOptions
    responder: ResponderConfig | None
    replay: Replay | None = None


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """All records of an episode, with its end last. An episode that was cancelled before it began has no end."""

    records: bytes
    lost: int
    """Records that could not be sent."""
    scorer_errors: dict[str, int]
    unlisted: dict[str, int]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker."""

    blocked: float = 0.0
    """Seconds for which its event loop has been blocked; 0 if it is not."""
    culprit: str | None = None
    """Id of the request whose code blocks it, if it can be determined."""
    where: str = ""
    """File, line and function of that code."""
    overdue: int = 0
    """Number of episodes that have ended while their plain function still runs in a thread."""
