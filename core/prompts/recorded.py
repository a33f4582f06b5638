"""The texts of recorded calls, each once, with the parts that come from tasks and answers."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from cotune.errors import RecordError
from cotune.prompts.chat_texts import MESSAGE_KEY, Kind, map_format, map_message, map_tool
from cotune.prompts.explained import Explained, Texts, texts_of
from cotune.prompts.material import single_material
from cotune.prompts.volatile import Span, intersection, union, volatile
from cotune.records.ids import canonical
from cotune.records.images import content_text
from cotune.records.structs import JUDGING, REFLECTING, CallRecord, Episode
from cotune.storage.protocol import Store

CALLS = 1_000
"""Maximum number of calls that are read. More calls would hardly show new texts."""


class Place(NamedTuple):
    """The place of a text in a role's requests."""

    role: str
    kind: Kind
    key: str


@dataclass
class SeenText:
    """One text of a place, and the calls that sent it."""

    text: str
    changing: list[Span]
    order: tuple[int, int]
    """Turn and position among the messages of its first occurrence."""
    explained: list[Span] | None = None
    """The spans that come from the episode in every episode that sent the text. Other spans are the application's."""
    calls: set[str] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)

    @property
    def gaps(self) -> list[Span]:
        """The spans that vary, as far as the records show."""
        return union([*self.changing, *(self.explained or ())])


@dataclass
class RoleCalls:
    """The calls of a role that were read."""

    calls: set[str] = field(default_factory=set)
    tasks: set[str] = field(default_factory=set)


@dataclass
class Recorded:
    """The texts of the calls that were read."""

    texts: dict[Place, dict[str, SeenText]] = field(default_factory=dict)
    roles: dict[str, RoleCalls] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    workflows: set[str] = field(default_factory=set)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of calls that were not read, by reason."""


def read_texts(
    store: Store, episodes: Iterable[Episode] | None = None, *, keep: Sequence[re.Pattern[str]] = (), calls: int = CALLS
) -> Recorded:
    """The texts of at most `calls` recorded calls, from these episodes, or from all that ran the application.

    The calls are spread over all tasks. Without `episodes`, episodes with edited prompts are used only if there are no
    others. Text that matches `keep` is treated as if it varied, so that it cannot be changed.
    """
    recorded = Recorded()
    # 1. Read the calls of as many episodes as are needed.
    usable = _usable_episodes(store, episodes)
    calls_of_episodes: list[tuple[Episode, list[CallRecord]]] = []
    roles: set[str] = set()
    count = 0
    for episode in _in_turn(usable):
        if count >= calls:
            recorded.left_out["more than are needed"] += episode.calls
            continue
        episode_calls = store.calls(episode.id)
        count += len(episode_calls)
        roles.update(call.role for call in episode_calls)
        calls_of_episodes.append((episode, episode_calls))

    # 2. Read the texts of the calls. Which parts of them vary depends on the roles and tasks of all these episodes.
    task_texts = texts_of(episode.task.input for episode, _ in calls_of_episodes)
    reading = _Reading(store, recorded, roles, keep, task_texts)
    for episode, episode_calls in calls_of_episodes:
        reading.episode(episode, episode_calls)

    # 3. A document that every text has under one label, such as "Context:", is material, not text of the prompt.
    for place, texts in recorded.texts.items():
        if place.kind in ("system", "user"):
            for text, spans in single_material(texts).items():
                texts[text].changing = union([*texts[text].changing, *spans])
    return recorded


def _usable_episodes(store: Store, episodes: Iterable[Episode] | None) -> list[Episode]:
    """The episodes that ran the application and were not cancelled. If `episodes` is None, they are the store's, and
    episodes with edited prompts are used only if there are no others."""
    usable: list[Episode] = []
    for episode in store.episodes() if episodes is None else episodes:
        if episode.phase not in (JUDGING, REFLECTING) and episode.status != "cancelled":
            usable.append(episode)
    unedited = [episode for episode in usable if not episode.prompts]
    if episodes is None and unedited:
        return unedited
    return usable


def _in_turn(episodes: Iterable[Episode]) -> Iterator[Episode]:
    """The episodes in another order: the first episode of each task, then the second of each, ..."""
    rounds: list[list[Episode]] = []
    episodes_of_task: Counter[str] = Counter()
    for episode in episodes:
        number = episodes_of_task[episode.task.id]
        episodes_of_task[episode.task.id] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(episode)
    for one_of_each_task in rounds:
        yield from one_of_each_task


class _Reading:
    """Reads the texts of calls, episode by episode."""

    def __init__(
        self, store: Store, found: Recorded, roles: set[str], keep: Sequence[re.Pattern[str]], tasks: Texts
    ) -> None:
        """Collect texts of calls into `found`.

        Args:
            roles: names of all roles, as the answers of other roles are no prompts.
            keep: patterns of text that must not be edited.
            tasks: texts of the tasks' inputs, which are no prompts either.
        """
        self._store = store
        self.found = found
        self.roles = roles
        self._keep = keep
        self._tasks = tasks
        self._bodies: dict[str, Any] = {}
        self._changing: dict[str, list[Span]] = {}

    def episode(self, episode: Episode, calls: Sequence[CallRecord]) -> None:
        """Read the texts of an episode's calls in their order.

        The results of tools before a call can be the source of its texts. After a lost result, the source of a text is
        not certain any more, so later calls are left out.
        """
        self.found.workflows.add(episode.workflow)
        so_far = _EpisodeSoFar(task_key(episode, calls), Explained(episode.task.input, self._tasks))
        results = deque(sorted(episode.results, key=lambda result: result.started))
        result_is_lost = False
        for call in sorted(calls, key=lambda call: call.step):
            while results and results[0].started < call.started:
                result = results.popleft()
                try:
                    so_far.explained.add_result(self._body(result.value))
                except RecordError:
                    result_is_lost = True
            if call.redacted:
                self.found.left_out["redacted"] += 1
            elif result_is_lost:
                self.found.left_out["after a lost result of a tool"] += 1
            else:
                self._call(call, so_far)
            so_far.explained.add_answer(call)

    def _call(self, call: CallRecord, so_far: _EpisodeSoFar) -> None:
        """Read the texts of one call: of its messages, tools and response format."""
        try:
            messages = [self._body(id) for id in call.messages]
            tools = self._body(call.tools) if call.tools else ()
        except RecordError:
            self.found.left_out["with a lost message"] += 1
            return
        role = self.found.roles.setdefault(call.role, RoleCalls())
        role.calls.add(call.id)
        role.tasks.add(so_far.task)
        if call.model:
            self.found.models.add(call.model)

        call_texts = _CallTexts(self, call, so_far)
        for position, (id, message) in enumerate(zip(call.messages, messages, strict=True)):
            is_result = isinstance(message, Mapping) and message.get("role") in ("tool", "function")
            if not is_result:
                call_texts.note_message(position, message)
            elif id not in so_far.result_messages:
                so_far.result_messages.add(id)
                so_far.explained.add_result(content_text(message.get("content")))
        # Descriptions of tools and of the response format are texts of the prompt, too.
        note_text = partial(call_texts.note_text, 0)
        for tool in tools or ():
            map_tool(tool, note_text)
        map_format(call.params.get("response_format"), note_text)

    def changing(self, text: str) -> list[Span]:
        """The spans of a text that change over time."""
        if text not in self._changing:
            self._changing[text] = volatile(text, self._keep)
        return self._changing[text]

    def _body(self, id: str) -> Any:
        """The content of a message or of tools, read once. Raises RecordError if it was lost."""
        if id not in self._bodies:
            self._bodies[id] = self._store.message(id)
        return self._bodies[id]


@dataclass(frozen=True)
class _EpisodeSoFar:
    """The state of an episode before a call: the texts that may be the source of texts in the call."""

    task: str
    explained: Explained
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """For each text of the earlier calls, the spans that come from the episode."""
    result_messages: set[str] = field(default_factory=set)
    """Ids of the messages with results of tools that `explained` has."""


@dataclass(frozen=True)
class _CallTexts:
    """Collects the texts of one call."""

    reading: _Reading
    call: CallRecord
    so_far: _EpisodeSoFar

    def note_message(self, position: int, message: Any) -> None:
        """Note the texts of a message, at this position among the messages of the call."""
        author = message.get("role") if isinstance(message, Mapping) else None
        if author == "assistant":
            # `map_message` leaves answers alone, but one that no call gave is an example in the prompt.
            text = message.get("content")
            if isinstance(text, str) and text:
                self.note_text(position, "assistant", MESSAGE_KEY, text)
            return
        other_roles = self.reading.roles - {self.call.role}
        if author == "user" and message.get("name") in other_roles:
            return  # the answer of another role: some frameworks pass answers on as user messages with a name
        map_message(message, partial(self.note_text, position))

    def note_text(self, position: int, kind: Kind, key: str, text: str) -> None:
        """Note a text at a place of the call: its episode-specific spans, its calls and tasks."""
        texts = self.reading.found.texts.setdefault(Place(self.call.role, kind, key), {})
        order = (self.call.turn, position)
        noted = texts.setdefault(text, SeenText(text, self.reading.changing(text), order))
        if text not in self.so_far.spans:
            # Computed only once: later answers cannot be the source of the text.
            self.so_far.spans[text] = self.so_far.explained.spans(text)
        spans = self.so_far.spans[text]
        # Over several episodes, a span is explained only if every one of them explains it.
        noted.explained = spans if noted.explained is None else intersection(noted.explained, spans)
        noted.order = min(noted.order, order)
        noted.calls.add(self.call.id)
        noted.tasks.add(self.so_far.task)


def task_key(episode: Episode, calls: Sequence[CallRecord]) -> str:
    """The identity of a task: its input without its id, or else the first request of the episode."""
    task_input = episode.task.input
    if task_input is None:
        return repr([call.messages for call in calls[:1]])
    if isinstance(task_input, Mapping) and len(task_input) > 1:
        task_input = {name: value for name, value in task_input.items() if name != "id"}
    return canonical(task_input).decode()
