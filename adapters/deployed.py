"""Runs an unchanged application on its trained role policies, in process."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Token
from pathlib import Path
from typing import Any, TypedDict, Unpack

from cotune.adapters.bases import Moved
from cotune.adapters.conversations import LocalResponder
from cotune.adapters.open_policies import LocalPolicies, ServedModel, open_local
from cotune.adapters.prompts import prompts_for
from cotune.episodes.later_feedback import check_key
from cotune.episodes.run_sync import run_sync
from cotune.episodes.tracing import Trace
from cotune.errors import ConfigError, CotuneError
from cotune.near_names import check_arguments
from cotune.prompts.edits import Prompts
from cotune.recording.call_records import CallerContext
from cotune.recording.carrying import carry_context
from cotune.recording.context import current_episode, recording
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.recording.redaction import Redactor
from cotune.recording.roles import RolesFunction, roles_function
from cotune.records.structs import CallRecord, Record, Task


class RecordingOptions(TypedDict, total=False):
    """How a deployment records its calls: keyword arguments of `cotune.deployed`."""

    records: str | Path | None
    app: str
    key: str
    redactor: Redactor | None


def deployed(
    source: str | Path | None = None,
    *,
    base: Moved = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    roles: RolesFunction | str | None = None,
    prompts: Prompts | str | Path | None = None,
    any_prompts: bool = False,
    **recording: Unpack[RecordingOptions],
) -> Deployment:
    """Answer every LLM call that the application makes inside the block with the policy of its role, from an export.

    Use it as `with` or `async with`. `base` is the present place of the base model if it was moved (for several, a
    mapping from the old place to the new one). `temperature` and `max_tokens` replace the application's settings.
    `roles` names the role of each call, as in training (`cotune.workflow`). Calls of roles that the export does not
    have are answered as its run was configured (`other_roles`): by the untrained model, or by the application's
    provider. Each of these roles is logged once. `unlisted` counts their calls, and `passed_through` the calls that the
    provider answered.

    Calls are sent with the edited prompts that the export was trained with, if any, or with `prompts`: a file, or a
    folder that has one. Prompts that it was not trained with are refused unless `any_prompts` is true. Without a
    `source` the application's provider answers. `unedited` counts calls that do not have the texts to be edited.

    With `records`, the address of a store or of a collector (for the application `app`), calls are recorded as in
    `cotune.trace`, with policy, version, token ids and log-probabilities, after `redactor`. The `with` is one episode,
    which the application names by `key`, and so is each `deployment.here(key=...)`. `deployment.trace` is the trace of
    the `with`.

    A `with` covers the code inside it, and threads and tasks started there. In other parts of the process (a web
    server's request handlers) use `with deployment.here():`. Raises AdapterError, ConfigError, SyncError.

    ```python
    with cotune.deployed("adapters/") as deployment:
        graph.invoke({"question": "2 + 2"})
    print(deployment.served)
    ```
    """
    check_arguments(recording, RecordingOptions.__annotations__)
    override: dict[str, Any] = {}
    if temperature is not None:
        override["temperature"] = temperature
    if max_tokens is not None:
        override["max_tokens"] = max_tokens
    if source is None and prompts is None:
        raise ConfigError("source", None, "is missing", "Name an export, or pass prompts= for the provider to answer.")
    chosen = prompts_for(source, prompts, any_prompts=any_prompts)

    records = recording.get("records")
    key = recording.get("key", "")
    open_trace: Callable[..., Trace] | None = None
    if records is not None:
        app = recording.get("app", "")
        redactor = recording.get("redactor")
        open_trace = functools.partial(Trace, records, app=app, redactor=redactor)
    elif key:
        raise ConfigError("key", key, "has no effect without records", "Pass records=, or leave it out.")
    return Deployment(source, base, override, roles_function(roles), chosen, open_trace, check_key(key))


class Deployment:
    """Trained policies in this process."""

    def __init__(
        self,
        source: str | Path | None,
        base: Moved,
        override: Mapping[str, Any],
        roles: RolesFunction | None,
        prompts: Prompts | None = None,
        open_trace: Callable[..., Trace] | None = None,
        key: str = "",
    ) -> None:
        """See `deployed` for the arguments. `override` has the sampling parameters that replace the application's, and
        `open_trace` opens the trace if calls are recorded. Engines are opened by `with`, not here.
        """
        self.source = source
        self.calls: Counter[tuple[str, str]] = Counter()
        """Ended calls by (role, status)."""
        self.passed_through: Counter[str] = Counter()
        """Ended calls that the application's provider answered, by role."""
        self.unlisted: Counter[str] = Counter()
        """Ended calls of roles that the export does not have, by role."""
        self.unedited: Counter[tuple[str, str]] = Counter()
        """Ended calls by (role, reason) that were sent unedited, although the prompts edit their role."""
        self.prompts = prompts
        """The edited prompts that calls are sent with."""
        self.served: Mapping[str, ServedModel] = {}
        """The policy of each role, once the deployment is open."""
        self._base = base
        self._override = override
        self._roles = roles
        self._is_open = False
        self._local: LocalPolicies | None = None
        self._responder: LocalResponder | None = None
        self._lock = threading.Lock()
        self._context_token: Token[LiveEpisode | None] | None = None
        self._open_trace = open_trace
        self._key = key
        self.trace: Trace | None = None
        """The trace of the `with`; None if its calls are not recorded."""

    @contextlib.contextmanager
    def here(self, *, task: Any = None, key: str = "") -> Iterator[Trace | None]:
        """Answer the calls made inside the block, in the current thread or task; the deployment must be open.

        If the deployment records calls, these calls are an episode of their own, of the `task`, which the application
        names by `key`; the block gets its trace.
        """
        with recording(self._new_episode()):
            if self._open_trace is None:
                yield None
            else:
                with self._open_trace(task=task, name="deployed", key=key) as trace:
                    yield trace

    def __enter__(self) -> Deployment:
        self._require_closed()
        self._begin(None if self.source is None else run_sync(open_local(self.source, base=self._base)))
        return self

    @property
    def version(self) -> str:
        """The version of the export that answers: `version 4 of 2026-11-29 12:30, run r1, step-000060`.

        Empty while the deployment is closed, and without an export.
        """
        return self._local.manifest.title if self._local and self._local.manifest else ""

    def __exit__(self, *exc: object) -> None:
        if (local := self._end(*exc)) is not None:
            run_sync(local.aclose())

    async def __aenter__(self) -> Deployment:
        self._require_closed()
        self._begin(None if self.source is None else await open_local(self.source, base=self._base))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if (local := self._end(*exc)) is not None:
            await local.aclose()

    def write(self, records: Sequence[Record]) -> None:
        """Count ended calls by role: all calls, unedited ones, and calls that no policy of the export has answered. The
        records themselves are not stored.
        """
        # The export may leave some roles to the application's provider. Calls of roles that the export does not have
        # are answered by its untrained model (`others`), or by the provider too.
        roles_of_provider: Sequence[str] = ()
        provider_answers_unlisted = True
        if self._local is not None:
            roles_of_provider = self._local.left_to_provider
            provider_answers_unlisted = self._local.others is None
        calls = [record for record in records if isinstance(record, CallRecord)]
        with self._lock:
            for call in calls:
                self.calls[call.role, call.status] += 1
                if call.unedited:
                    self.unedited[call.role, call.unedited] += 1
                if call.role in self.served:
                    continue  # a policy of the export has answered it
                if call.role in roles_of_provider:
                    self.passed_through[call.role] += 1
                    continue
                # Without a source there is no export that could list the role.
                if self.source is not None:
                    self.unlisted[call.role] += 1
                if provider_answers_unlisted:
                    self.passed_through[call.role] += 1

    def _require_closed(self) -> None:
        if self._is_open:
            raise CotuneError(f"{self._name} is already deployed by this object.", "Use deployment.here() inside it.")

    @property
    def _name(self) -> str:
        return "This deployment" if self.source is None else str(self.source)

    def _begin(self, local: LocalPolicies | None) -> None:
        """Install the hooks and open the episode of the deployment, once its policies are loaded.

        `local` is None if the application's provider answers every call.
        """
        self._is_open = True
        self._local = local
        if local is not None:
            self.served = local.served
            self._responder = LocalResponder(local, self._override)
        for activate in hooks.activators:
            activate()
        carry_context(remember_starters=self._roles is not None)
        self._context_token = current_episode.set(self._new_episode())
        if self._open_trace is not None:
            self.trace = self._open_trace(name="deployed", key=self._key).__enter__()

    def _end(self, *exc: Any) -> LocalPolicies | None:
        """End the trace and the episode of the `with`. `exc` are the arguments of `__exit__`. Returns the policies, for
        the caller to close.
        """
        assert self._is_open and self._context_token is not None
        self._is_open = False
        if self.trace is not None:
            self.trace.__exit__(*exc)
        # An async deployment may end in another context than it began in; the variable cannot be reset from there.
        with contextlib.suppress(ValueError):
            current_episode.reset(self._context_token)
        local = self._local
        self._local = None
        return local

    def _new_episode(self) -> LiveEpisode:
        """An episode that never ends, for the calls that the application makes inside a `with`. Raises CotuneError if
        the deployment is not open.
        """
        if not self._is_open:
            raise CotuneError(f"{self._name} is not open.", "Enter it first: with cotune.deployed(...) as deployment.")
        task = Task(id="deployed", input=None)
        episode = _EndlessEpisode(
            self, task, workflow="deployed", responder=self._responder, roles=self._roles, prompts=self.prompts
        )
        # No episode of a deployment is replayed, and the results of tools would fill the memory.
        episode.tape.records_results = False
        return episode


class _EndlessEpisode(LiveEpisode):
    """An episode that may last as long as the process. Each call gets an episode of its own, so that memory stays
    bounded."""

    def start(self, caller: CallerContext, body: Mapping[str, Any]) -> LiveCall:
        """Start a call in an episode of its own: the calls of an endless episode would fill the memory."""
        if self.forked:
            return super().start(caller, body)  # raises RecordError: no run reaches a forked process
        episode_of_call = LiveEpisode(
            self.sink,
            self.task,
            workflow=self.workflow,
            responder=self.responder,
            roles=self.roles,
        )
        episode_of_call.prompting = self.prompting
        return episode_of_call.start(caller, body)
