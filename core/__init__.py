"""cotune: train the agents you already have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from cotune.episodes.workflows import workflow
from cotune.errors import CotuneError, Outage
from cotune.lazy_names import opener
from cotune.recording.hooks import hooks
from cotune.recording.role import role
from cotune.replay.tools import recorded
from cotune.sampling.scoring import Feedback

if TYPE_CHECKING:
    from cotune.adapters.deployed import deployed
    from cotune.adapters.serving import serve
    from cotune.episodes.later_feedback import feedback
    from cotune.episodes.tracing import trace
    from cotune.integrations.judging.judge import Judge
    from cotune.integrations.web.gateway.server import gateway
    from cotune.trainer.before.check.dry_run import check
    from cotune.trainer.blame.analysis import blame
    from cotune.trainer.evaluation.evaluate import evaluate
    from cotune.trainer.export import export
    from cotune.trainer.train import resume, train
    from cotune.version import __version__ as __version__
else:
    __getattr__ = opener(
        __name__,
        {
            "Judge": "cotune.integrations.judging.judge",
            "blame": "cotune.trainer.blame.analysis",
            "check": "cotune.trainer.before.check.dry_run",
            "deployed": "cotune.adapters.deployed",
            "evaluate": "cotune.trainer.evaluation.evaluate",
            "export": "cotune.trainer.export",
            "feedback": "cotune.episodes.later_feedback",
            "gateway": "cotune.integrations.web.gateway.server",
            "resume": "cotune.trainer.train",
            "serve": "cotune.adapters.serving",
            "trace": "cotune.episodes.tracing",
            "train": "cotune.trainer.train",
            "__version__": "cotune.version",
        },
    )

__all__ = [
    "CotuneError",
    "Feedback",
    "Judge",
    "Outage",
    "blame",
    "check",
    "deployed",
    "evaluate",
    "export",
    "feedback",
    "gateway",
    "recorded",
    "resume",
    "role",
    "serve",
    "trace",
    "train",
    "workflow",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def _activate() -> None:
    from cotune.integrations.apps.activation import activate

    activate()


def _activate_on_import() -> None:
    from cotune.integrations.apps.activation import activate_on_import

    activate_on_import()


def _graph_runner(app: object) -> Callable[[Any], Awaitable[Any]] | None:
    from cotune.integrations.apps.activation import graph_runner

    return graph_runner(app)


def _freeze() -> None:
    from cotune.integrations.replay.clock import install as hook_clock
    from cotune.replay.draws import install as hook_draws

    hook_clock()
    hook_draws()


def _be_quiet() -> None:
    from cotune.integrations.apps.activation import be_quiet

    be_quiet()


hooks.activators.append(_activate)
hooks.starters.append(_be_quiet)
hooks.freezers.append(_freeze)
hooks.runners.append(_graph_runner)
# Also at import: LangChain composes an agent's middleware when the agent is created, which applications do at import.
_activate_on_import()
