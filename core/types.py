"""The types that users write, and that public functions take and return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cotune.episodes.tracing import Trace, TracedCall
from cotune.episodes.workflows import Workflow, WorkflowFunction, WorkflowSource
from cotune.judging.episodes import EpisodeJudge, FinishedCall, FinishedEpisode
from cotune.lazy_names import opener
from cotune.recording.redaction import Redactor
from cotune.recording.roles import CallRequest, RolesFunction
from cotune.records.structs import Candidate, Task
from cotune.sampling.scoring import Call, GroupScorer, Reward, Scorer

if TYPE_CHECKING:
    from cotune.adapters.deployed import Deployment
    from cotune.adapters.manifest import Manifest
    from cotune.config.train import TrainConfig
    from cotune.integrations.judging.endpoint import JudgeSettings
    from cotune.integrations.web.gateway.server import Gate
    from cotune.reading.blame import Blame
    from cotune.reading.evaluations import EvaluationReport
    from cotune.trainer.before.check.report import CheckLimits, CheckReport
    from cotune.trainer.blame.options import BlameOptions
    from cotune.trainer.evaluation.modes import EvaluationOptions
    from cotune.trainer.reporting.summary import RunSummary
else:
    __getattr__ = opener(
        __name__,
        {
            "Blame": "cotune.reading.blame",
            "BlameOptions": "cotune.trainer.blame.options",
            "CheckLimits": "cotune.trainer.before.check.report",
            "CheckReport": "cotune.trainer.before.check.report",
            "Deployment": "cotune.adapters.deployed",
            "EvaluationOptions": "cotune.trainer.evaluation.modes",
            "EvaluationReport": "cotune.reading.evaluations",
            "Gate": "cotune.integrations.web.gateway.server",
            "JudgeSettings": "cotune.integrations.judging.endpoint",
            "Manifest": "cotune.adapters.manifest",
            "RunSummary": "cotune.trainer.reporting.summary",
            "TrainConfig": "cotune.config.train",
        },
    )

__all__ = [
    "Blame",
    "BlameOptions",
    "Call",
    "CallRequest",
    "Candidate",
    "CheckLimits",
    "CheckReport",
    "Deployment",
    "EpisodeJudge",
    "EvaluationOptions",
    "EvaluationReport",
    "FinishedCall",
    "FinishedEpisode",
    "Gate",
    "GroupScorer",
    "JudgeSettings",
    "Manifest",
    "Redactor",
    "Reward",
    "RolesFunction",
    "RunSummary",
    "Scorer",
    "Task",
    "Trace",
    "TracedCall",
    "TrainConfig",
    "Workflow",
    "WorkflowFunction",
    "WorkflowSource",
]


def __dir__() -> list[str]:
    return sorted(__all__)
