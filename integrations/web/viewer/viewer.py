"""The runs of the viewer, with all that their pages share: addresses, groups, sums, and the frame of a page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from threading import Lock
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cotune.config.train import STEPS_AHEAD
from cotune.integrations.web.viewer.rendering import HUES, render
from cotune.integrations.web.viewer.tokens import Colouring
from cotune.reading.find_runs import FoundRuns
from cotune.reading.groups import StepGroups, step_groups
from cotune.reading.run import OpenedRun
from cotune.reading.use import Totals
from cotune.records.prices import Prices
from cotune.records.structs import Episode
from cotune.storage.token_figures import read_token_figures

_KEPT_STEPS = 4


class Page(msgspec.Struct, frozen=True):
    """A page: its address, the function that answers it, and the tab that is marked on it. The first page of a tab is
    the one that the tab leads to. `sampled` pages are of episodes that the run sampled itself."""

    path: str
    answer: Callable[[Viewer, Request], Response | Awaitable[Response]]
    tab: str = ""
    sampled: bool = False
    method: str = "GET"


class KnownField(msgspec.Struct, frozen=True):
    """A documented field of the configuration: its default, as the page shows values, and its help."""

    default: str
    help: str


class Viewer:
    """Found runs, as pages show them. `fields` are those of the configuration, by dotted name, in the order of the
    documentation."""

    def __init__(
        self,
        found: FoundRuns,
        prices: Prices,
        pages: tuple[Page, ...],
        fields: Mapping[str, KnownField] = MappingProxyType({}),
    ) -> None:
        self._found = found
        self.runs = found.opened
        self.prices = prices
        self.fields = fields
        self._tabs = {page.tab: page for page in reversed(pages) if page.path.startswith("/run/{run}") and page.tab}
        self._steps: OrderedDict[tuple[OpenedRun, int | None, str], StepGroups] = OrderedDict()
        self._totals: dict[str, tuple[OpenedRun, Totals]] = {}
        self._lock = Lock()

    def look_again(self) -> None:
        """Open runs that are new in the folders."""
        self._found.look_again()

    def run(self, request: Request) -> OpenedRun:
        """The run of an address. Raises HTTPException (404) for one that is not shown."""
        return self.named(request.path_params["run"])

    def named(self, name: str) -> OpenedRun:
        """A run by its name, or the records of one of its evaluations: `RUN:FOLDER`."""
        whole, _, folder = name.rpartition(":")
        opened = self.runs.get(name) or self.runs.get(whole)
        if opened is None or opened.gone:  # removed, or another one is in its place
            self.look_again()
        if name in self.runs:
            return self.runs[name]
        part = self.runs[whole].part(folder) if whole in self.runs else None
        if part is None:
            raise HTTPException(404, f"There is no run {name} here.")
        return part

    def chosen(self, request: Request) -> tuple[OpenedRun | None, list[OpenedRun]]:
        """The one run of an address, or None, and the runs to show: those of `run` parameters, else all."""
        if "run" in request.path_params:
            return (run := self.run(request)), [run]
        names = request.query_params.getlist("run")
        if not names and any(run.gone for run in self.runs.values()):
            self.look_again()
        return None, [self.named(name) for name in names] or list(self.runs.values())

    def groups(self, run: OpenedRun, step: int | None) -> StepGroups:
        """Groups of a step (as records number it, from 0); those of the latest pages are kept."""
        key = (run, step, run.stamp)
        with self._lock:
            if key in self._steps:
                self._steps.move_to_end(key)
                return self._steps[key]
            found = self._steps[key] = step_groups(run, step)
            while len(self._steps) > _KEPT_STEPS:
                self._steps.popitem(last=False)
            return found

    def groups_of(self, run: OpenedRun, episode: Episode | None) -> StepGroups | None:
        """The groups of an episode's training step; None outside of training."""
        if episode is None or episode.phase != "train" or episode.training_step is None:
            return None
        return self.groups(run, episode.training_step)

    def colouring(self, request: Request, run: OpenedRun, episode: Episode | None, policy: str = "") -> Colouring:
        """The colours of candidates that a page is asked for (`by`); the tokenizer is that of the policy's base."""
        by, figures = request.query_params.get("by", ""), None
        if by in ("entropy", "ratio") and run.folder and episode and episode.training_step is not None:
            figures = read_token_figures(run.folder, episode.training_step, STEPS_AHEAD)
        own = run.about.base_of(policy) if policy else None
        return Colouring(by, own or str(run.description.get("model") or ""), figures)

    def totals(self, run: OpenedRun) -> Totals:
        """The sums over the calls of a run."""
        with self._lock:
            if run.name not in self._totals or self._totals[run.name][0] is not run:
                self._totals[run.name] = (run, Totals(run))
            return self._totals[run.name][1]

    def page(self, request: Request, template: str, run: OpenedRun | None = None, **values: Any) -> Response:
        """A page within the frame that all pages have."""
        samples = run is None or run.samples
        about = {
            "runs": self.runs,
            "run": run,
            "state": run.state if run else "",
            "stamp": run.stamp if run else "",
            "here": request.state.tab,
            "tabs": [page for page in reversed(self._tabs.values()) if samples or not page.sampled],
            "samples": samples,
        }
        return HTMLResponse(render(template, **about, **values))


def hues(run: OpenedRun, *roles: str) -> dict[str, int]:
    """A colour for each role of a run, and for these, in the order of their names."""
    trained = {role for line in run.metrics[-1:] for role in line["roles"]}
    return {role: place % HUES for place, role in enumerate(sorted({*run.figures.recent_roles(), *trained, *roles}))}


def whole(text: str | None) -> int | None:
    """A parameter of an address as a whole number; None for anything else."""
    return int(text) if text and text.lstrip("-").isdecimal() and len(text) < 10 else None


def start(request: Request) -> int:
    """The place in a list at which a page begins."""
    return max(0, whole(request.query_params.get("from")) or 0)
