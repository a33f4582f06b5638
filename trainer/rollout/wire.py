"""What crosses between the driver and its rollout workers."""

from __future__ import annotations

from typing import Any

import msgspec

from cotune.episodes.episode import EpisodeOptions
from cotune.records.structs import Task
from cotune.replay.script import Replay
from cotune.trainer.rollout.app_source import AppSource
from cotune.trainer.run.episode_runner import ResponderConfig


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker starts with."""

    app: AppSource
    sampler: Any = None
    """A Sampler that crosses processes, such as RaySampler; None leaves all calls to the application's provider."""
    bases: dict[str, list[str]] = {}
    """Folders or ids whose chat templates the workers use, the run's own first, and the policies of each."""
    tool_formats: dict[str, str] = {}
    """How each of them writes tool calls."""
    run_folder: str | None = None
    """Folder of the run, where it has one."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is ready, and what it found the workflow to be."""

    workflow: str
    scorers: tuple[str, ...]
    redactors: int


class EpisodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to run; with a `replay` it repeats a recorded one."""

    id: str
    task: Task
    options: EpisodeOptions
    responder: ResponderConfig | None
    replay: Replay | None = None


class EpisodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """All that an episode recorded, its end last; no end where it was cancelled before it began."""

    records: bytes
    lost: int
    """Records that could not be sent."""
    scorer_errors: dict[str, int]
    unlisted: dict[str, int]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is."""

    blocked: float = 0.0
    """Seconds for which its event loop has not come round; 0 where that is normal."""
    culprit: str | None = None
    """Id of the request whose code blocks it, where that can be told."""
    where: str = ""
    """File, line and function of that code."""
    overdue: int = 0
    """Episodes that have ended while their plain function runs on in a thread."""
