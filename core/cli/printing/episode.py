"""`cotune show --episode`: one episode as a tree of calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from cotune.errors import RecordError
from cotune.records.ids import candidate_id
from cotune.records.images import content_text
from cotune.records.structs import CallRecord, Episode
from cotune.storage.protocol import Store
from cotune.tables import BAD, GOOD, NAME, QUIET, answer_line, first_line, plural, scores, snippet

_REWARDS = 30
"""Maximum length of a candidate's rewards that leave room for its answer on the same line, in characters."""


def episode_parts(store: Store, id: str, full: bool = False) -> Iterable[RenderableType]:
    """An episode as a tree of its calls, after a line with the reason if it failed (with `full`, the whole error)."""
    calls = store.calls(id)
    if cause := _failure_cause(store, id, calls, full):
        yield Text(cause, style=BAD)
    yield episode_tree(store, id, calls, full)


def _failure_cause(store: Store, id: str, calls: Sequence[CallRecord], full: bool) -> str:
    """The reason why an episode failed or was cancelled; empty for other episodes."""
    try:
        episode = store.episode(id)
    except RecordError:
        return ""
    if episode.status == "ok":
        return ""
    error = (episode.error or "").strip()
    status: str = episode.status
    last_failed = next((call for call in reversed(calls) if call.status != "ok"), None)
    if last_failed is not None:
        status += f" (call {last_failed.step}, {last_failed.role}: {last_failed.status})"
        error = error or last_failed.error or ""
    if full and error:
        return f"{status}: {error}"
    return f"{status}: {first_line(error)}"


def episode_tree(store: Store, id: str, calls: Sequence[CallRecord], full: bool = False) -> Tree:
    """An episode as a tree: each call is below the latest call whose output it read. A chain of calls stays on one
    level."""
    root = Tree(_episode_line(store, id, calls), guide_style=QUIET)
    for text in _feedback(store.feedback([id])[id], full):
        root.add(text)
    by_id = {call.id: call for call in calls}
    readers_of: dict[str | None, list[CallRecord]] = {}
    for call in calls:
        parents = [by_id[parent] for parent in call.parents if parent in by_id]
        latest = max(parents, key=lambda parent: parent.step, default=None)
        readers_of.setdefault(latest.id if latest else None, []).append(call)
    # A stack instead of recursion: a chain of calls may be longer than the limit of recursion.
    waiting = [(root, call) for call in reversed(readers_of.get(None, []))]
    while waiting:
        parent, call = waiting.pop()
        branch = parent.add(_call_line(call, by_id))
        for text in _call_details(store, call, full):
            branch.add(text)
        readers = readers_of.get(call.id, [])
        parent_of_readers = parent if len(readers) == 1 else branch
        waiting.extend((parent_of_readers, reader) for reader in reversed(readers))
    return root


def _episode_line(store: Store, id: str, calls: Sequence[CallRecord]) -> Text:
    """The first lines of an episode's tree: task, status, rewards, start and input.

    An episode that was interrupted has calls in the records but no row of its own.
    """
    line = Text.assemble(("episode ", "bold"), (id, NAME))
    try:
        episode: Episode = store.episode(id)
    except RecordError:
        if not calls:
            raise
        return line.append("  unfinished: it has calls but no end", style=BAD)
    line.append(f"  task {episode.task.id} · {episode.phase}")
    if episode.training_step is not None:
        line.append(f" step {episode.training_step + 1}")
    line.append(f" · {plural(len(calls), 'call')} · {episode.latency:.2f} s · ")
    line.append(episode.status, style=GOOD if episode.status == "ok" else BAD)
    line.append("  ").append_text(scores(store.rewards([id])[id]))
    if len(calls) != episode.calls:
        line.append(f"\n{episode.calls} calls were made, {len(calls)} are recorded", style=BAD)
    if fork := episode.fork:
        step = next((call.step for call in calls if call.id == fork.at), None)
        line.append(f"\nrepeats episode {fork.trunk} up to call {step}", style=QUIET)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(episode.started))
    return line.append(f"\n{began}  input {snippet(episode.task.input)}", style=QUIET)


def _call_line(call: CallRecord, by_id: Mapping[str, CallRecord]) -> Text:
    """The line of a call in an episode's tree: its role and turn, the calls whose output it read, tokens, time and
    policy.
    """
    line = Text.assemble((f"{call.step} ", QUIET), (call.role, "bold"), f" turn {call.turn}")
    steps_read = sorted(by_id[parent].step for parent in call.parents if parent in by_id)
    if steps_read:
        line.append(f" reads {', '.join(map(str, steps_read))}", style=QUIET)
    line.append(f" · {call.prompt_length}+{call.answer_length} tokens · {call.latency:.3f} s")
    line.append(f" · {call.policy or call.model or 'no model name'}", style=QUIET)
    if call.replayed:
        line.append(" · from the record", style=QUIET)
    if call.unedited:
        line.append(f" · {call.unedited}: sent unedited", style=BAD)
    elif call.edited:
        line.append(f" · edited prompts {call.prompts[:8]}", style=QUIET)
    if call.attempts:
        line.append(f" · {plural(len(call.attempts), 'retry', 'retries')}", style=QUIET)
    if call.status != "ok":
        line.append(f" · {call.status}", style=BAD)
    return line


def _call_details(store: Store, call: CallRecord, full: bool) -> Iterable[Text]:
    """The lines below a call in an episode's tree: its prompt, its retries and error, and its candidates."""
    yield from _prompt_lines(store, call, full)
    for attempt in call.attempts:
        yield _shorten(Text(f"retried after {attempt}", style=QUIET))
    if call.error and full:
        yield Text(call.error, style=BAD)
    elif call.error:
        yield _shorten(Text(first_line(call.error), style=BAD))
    yield from _candidate_lines(store, call, full)


def _prompt_lines(store: Store, call: CallRecord, full: bool) -> Iterable[Text]:
    """The last message of a call's prompt; with `full` all messages. A message that was edited before it was sent is
    shown in both forms.
    """
    last = len(call.messages) - 1
    for position, id in enumerate(call.messages):
        if not full and position < last:
            continue
        yield _one_line(Text(f"< {_message_text(store, id, full)}", style=QUIET), full)
        if position in call.changed:
            sent = _message_text(store, call.changed[position], full)
            yield _one_line(Text(f"< sent instead, by edited prompts: {sent}"), full)


def _candidate_lines(store: Store, call: CallRecord, full: bool) -> Iterable[Text]:
    """A line for each candidate of a call with its rewards and answer, then lines with the feedback on it. The line of
    the chosen candidate begins with `>`.
    """
    ids = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
    rewards = store.rewards(ids)
    feedback = store.feedback(ids)
    for target, candidate in zip(ids, call.candidates, strict=True):
        is_chosen = candidate.index == call.chosen
        line = Text("> " if is_chosen else "  ", style=GOOD)
        reward_text = scores(rewards[target])
        line.append_text(reward_text)
        if reward_text:
            line.append("  " if len(line) < _REWARDS else "\n  ")
        if candidate.finish_reason == "length":
            line.append("[cut at the length limit] ", style=BAD)
        answer = _full_message(candidate.message) if full else answer_line(candidate)
        line.append(answer, style="" if is_chosen else QUIET)
        yield _one_line(line, full)
        yield from _feedback(feedback[target], full)


def _message_text(store: Store, id: str, full: bool) -> str:
    """The text of a message, or its beginning."""
    try:
        message = store.message(id)
    except RecordError:
        return "lost"
    return _full_message(message) if full else snippet(message)


def _feedback(texts: Mapping[str, str], full: bool) -> Iterable[Text]:
    """The texts given with the rewards of an episode or a candidate."""
    for name, text in texts.items():
        label = f"why {name}" if len(texts) > 1 else "why"
        yield _one_line(Text(f"  {label}: {text if full else snippet(text)}", style=QUIET), full)


def _full_message(message: Any) -> str:
    """A message as text, not shortened: its role, its content, and its other fields (such as tool calls) as JSON."""
    if not isinstance(message, Mapping):
        return json.dumps(message, ensure_ascii=False, indent=2)
    text = content_text(message.get("content"))
    further_fields = {key: value for key, value in message.items() if key not in ("role", "content") and value}
    parts = [text] if text else []
    if further_fields:
        parts.append(json.dumps(further_fields, ensure_ascii=False, indent=2))
    return f"{message.get('role', 'message')}: " + "\n".join(parts)


def _one_line(text: Text, full: bool) -> Text:
    """The text, which the terminal cuts to one line unless `full` is set."""
    return text if full else _shorten(text)


def _shorten(text: Text) -> Text:
    """The text, which the terminal cuts to one line."""
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text
