"""The runs of the viewer, and everything that their pages share: addresses, groups, sums, and the frame of a page."""

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

_CACHED_STEPS = 4
"""Training steps whose groups are kept in memory."""


class Page(msgspec.Struct, frozen=True):
    """A page of the viewer."""

    path: str
    answer: Callable[[Viewer, Request], Response | Awaitable[Response]]
    tab: str = ""
    """The tab that is marked on the page. A tab leads to its first page."""
    sampled: bool = False
    """Whether the page needs episodes that the run sampled itself."""
    analysed: bool = False
    """Whether the page needs an analysis of `cotune blame` in the folder of the run."""
    method: str = "GET"


class KnownField(msgspec.Struct, frozen=True):
    """A documented field of the configuration: its default, as the page shows values, and its help."""

    default: str
    help: str


class Viewer:
    """The runs that pages show. `fields` are the fields of the configuration by dotted name, in the documentation's
    order."""

    def __init__(
        self,
        found: FoundRuns,
        prices: Prices,
        pages: tuple[Page, ...],
        fields: Mapping[str, KnownField] = MappingProxyType({}),
    ) -> None:
        """The state of a viewer: the runs that it shows, and results that are kept between requests because they take
        long to compute.
        """
        self._found = found
        self.runs = found.opened
        self.prices = prices
        self.fields = fields
        self._first_pages: dict[str, Page] = {}
        """Tab of a run -> the first of its pages, where the tab leads."""
        for page in pages:
            if page.tab and page.path.startswith("/run/{run}"):
                self._first_pages.setdefault(page.tab, page)
        self._steps: OrderedDict[tuple[OpenedRun, int | None, str], StepGroups] = OrderedDict()
        self._totals: dict[str, tuple[OpenedRun, Totals]] = {}
        self._lock = Lock()

    def look_again(self) -> None:
        """Look for new runs in the folders and open them."""
        self._found.look_again()

    def run(self, request: Request) -> OpenedRun:
        """The run of an address. Raises HTTPException (404) for one that is not shown."""
        return self.named(request.path_params["run"])

    def named(self, name: str) -> OpenedRun:
        """A run by its name, or the records of one of its evaluations: `RUN:FOLDER`."""
        run_name, _, folder = name.rpartition(":")
        opened = self.runs.get(name) or self.runs.get(run_name)
        # The run may be new, or removed and replaced by another one of the same name.
        if opened is None or opened.gone:
            self.look_again()
        if name in self.runs:
            return self.runs[name]
        records = self.runs[run_name].part(folder) if run_name in self.runs else None
        if records is None:
            raise HTTPException(404, f"There is no run {name} here.")
        return records

    def chosen(self, request: Request) -> tuple[OpenedRun | None, list[OpenedRun]]:
        """The run in the path of an address, and the runs to show.

        If the path has no run, the first value is None, and the address chooses runs by parameters `run=NAME` (without
        any: all runs).
        """
        if "run" in request.path_params:
            run = self.run(request)
            return run, [run]
        names = request.query_params.getlist("run")
        if not names and any(run.gone for run in self.runs.values()):
            self.look_again()
        if not names:
            return None, list(self.runs.values())
        return None, [self.named(name) for name in names]

    def groups(self, run: OpenedRun, step: int | None) -> StepGroups:
        """The groups of a training step, counted from 0 as in records. The latest results are cached, as grouping takes
        seconds.
        """
        key = (run, step, run.stamp)
        with self._lock:
            if key in self._steps:
                self._steps.move_to_end(key)
                return self._steps[key]
            groups = step_groups(run, step)
            self._steps[key] = groups
            while len(self._steps) > _CACHED_STEPS:
                self._steps.popitem(last=False)
            return groups

    def groups_of(self, run: OpenedRun, episode: Episode | None) -> StepGroups | None:
        """The groups of an episode's training step; None outside of training."""
        if episode is None or episode.phase != "train" or episode.training_step is None:
            return None
        return self.groups(run, episode.training_step)

    def colouring(self, request: Request, run: OpenedRun, episode: Episode | None, policy: str = "") -> Colouring:
        """The colouring that the request asks for (`by`), with the tokenizer of the policy's base model."""
        by = request.query_params.get("by", "")
        figures = None
        if by in ("entropy", "ratio") and run.folder and episode and episode.training_step is not None:
            # An episode may be trained on in a later step than its own.
            figures = read_token_figures(run.folder, episode.training_step, STEPS_AHEAD)
        base = run.about.base_of(policy) if policy else None
        return Colouring(by, base or str(run.description.get("model") or ""), figures)

    def totals(self, run: OpenedRun) -> Totals:
        """The sums over the calls of a run."""
        with self._lock:
            if run.name not in self._totals or self._totals[run.name][0] is not run:
                self._totals[run.name] = (run, Totals(run))
            return self._totals[run.name][1]

    def page(self, request: Request, template: str, run: OpenedRun | None = None, **values: Any) -> Response:
        """Render a page inside the frame that all pages share: the list of runs, and the tabs that fit the run."""
        has_own_episodes = run is None or run.samples  # a run may also learn from recorded episodes alone
        has_analysis = run is not None and run.blame is not None
        tabs = []
        for page in self._first_pages.values():
            if page.sampled and not has_own_episodes:
                continue
            if page.analysed and not has_analysis:
                continue
            tabs.append(page)
        frame = {
            "runs": self.runs,
            "run": run,
            "state": run.state if run else "",
            "stamp": run.stamp if run else "",
            "here": request.state.tab,
            "tabs": tabs,
            "samples": has_own_episodes,
        }
        return HTMLResponse(render(template, **frame, **values))


def hues(run: OpenedRun, *roles: str) -> dict[str, int]:
    """A number of a colour for each role of a run, and for the passed `roles`, in the order of their names."""
    trained = run.metrics[-1]["roles"] if run.metrics else ()
    all_roles = sorted({*run.figures.recent_roles(), *trained, *roles})
    return {role: place % HUES for place, role in enumerate(all_roles)}


def whole(text: str | None) -> int | None:
    """A parameter of an address as a whole number; None for anything else."""
    return int(text) if text and text.lstrip("-").isdecimal() and len(text) < 10 else None


def start(request: Request) -> int:
    """The place in a list at which a page begins."""
    return max(0, whole(request.query_params.get("from")) or 0)
