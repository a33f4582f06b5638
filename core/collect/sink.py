"""The interface of a collector, and the records that a trace sends to it: all, or a share by role."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn, Protocol

from cotune.errors import ConfigError, RecordError
from cotune.records.structs import CallRecord, Episode, Message, Record, Segment

Rates = float | Mapping[str, float]
"""The share of episodes to send; or by role, the share of episodes in which its calls are sent, `*` for other roles."""
MOST_HELD_BYTES = 4 << 20
"""Approximate size of messages that are held back for later calls, in bytes. If there are more, they are sent even if
no call needs them."""


def check_rates(rates: Rates) -> Rates:
    """The sampling rates. Raises ConfigError for a rate that is not between 0 and 1."""
    rate_of_field: dict[str, Any] = {"sample": rates}
    if isinstance(rates, Mapping):
        rate_of_field = {f"sample[{role!r}]": rate for role, rate in rates.items()}
    for field, rate in rate_of_field.items():
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not 0 <= rate <= 1:
            raise ConfigError(field, rate, "must be a number from 0 to 1", "For example: sample={'planner': 0.1}")
    return rates


class Collector(Protocol):
    """This process's connection to a collector, for one application."""

    url: str

    def write(self, records: Sequence[Record]) -> None:
        """Send records soon. Never waits for the network and never raises."""
        ...

    def leave_out(self, calls: int) -> None:
        """Count calls that a sampling rate leaves out."""
        ...


class CollectorRecords:
    """Sends the records of one episode to a collector, except calls that the sampling rates leave out."""

    def __init__(self, collector: Collector, rates: Rates = 1.0) -> None:
        """`rates` is the share of episodes to send, or a share for each role, with "*" for the other roles."""
        self._collector = collector
        self._role_rates: Mapping[str, float] = rates if isinstance(rates, Mapping) else {}
        self._sends: Literal["everything", "nothing", "some roles"]
        """One share decides here about the whole episode. Shares by role decide at the first call of each role."""
        if isinstance(rates, Mapping) and rates:
            self._sends = "some roles"
        elif isinstance(rates, Mapping) or random.random() < rates:  # an empty mapping limits no role
            self._sends = "everything"
        else:
            self._sends = "nothing"
        self._sends_role: dict[str, bool] = {}
        """Whether the calls of a role are sent, by role."""
        self._left_out: set[str] = set()
        """Ids of calls that were left out."""
        self._held: dict[str, Message | Segment] = {}
        """Messages and segments that have not been sent: a later call may need them."""
        self._size = 0
        """Approximate size of `_held` in bytes."""
        self._lock = threading.Lock()

    def write(self, records: Sequence[Record]) -> None:
        """Send the records to the collector, except those that the rates leave out."""
        if self._sends == "nothing":
            n_calls = sum(isinstance(record, CallRecord) for record in records)
            self._collector.leave_out(n_calls)
            return
        if self._sends == "some roles":
            records = self._records_to_send(records)
        if records:
            self._collector.write(records)

    def reading(self) -> AbstractContextManager[NoReturn]:
        """Raises RecordError: records at a collector cannot be read here."""
        raise RecordError(
            f"The records of this trace go to {self._collector.url}.",
            "Read them in the collector's store: cotune show.",
        )

    def close(self) -> None:
        """Do nothing: the collector's spool has all records."""

    def _records_to_send(self, records: Sequence[Record]) -> list[Record]:
        """Choose the new records to send by the roles of their calls, and put before each the messages and segments of
        tokens that it needs.

        Messages and segments come before the calls that use them. They are held back until a call that is sent needs
        them, because the calls that use them may all be left out.
        """
        to_send: list[Record] = []
        with self._lock:
            self._choose_left_out(records)
            for record in records:
                if isinstance(record, Message | Segment):
                    self._held[record.id] = record
                    self._size += len(record.packed) if isinstance(record, Segment) else len(repr(record.body))
                elif isinstance(record, CallRecord):
                    if record.id not in self._left_out:
                        to_send += self._take_held(_needed_ids(record))
                        to_send += self._take_path(record.prompt)
                        to_send.append(record)
                elif isinstance(record, Episode):
                    to_send += self._take_held([*(result.value for result in record.results), record.chance])
                    to_send.append(record)
                else:  # a reward of an episode, or of a call's candidate, whose id begins with the id of the call
                    target = record.target.partition(".")[0]
                    if target not in self._left_out:
                        to_send.append(record)
            if self._size > MOST_HELD_BYTES:
                to_send += self._take_held(list(self._held))
        return to_send

    def _choose_left_out(self, records: Sequence[Record]) -> None:
        """Add the calls that are not sent to `_left_out`, and count them at the collector.

        At the first call of a role, a random draw decides about all calls of the role in this episode.
        """
        left_out: list[str] = []
        for record in records:
            if not isinstance(record, CallRecord):
                continue
            role = record.role
            if role not in self._sends_role:
                rate_of_others = self._role_rates.get("*", 1.0)
                self._sends_role[role] = random.random() < self._role_rates.get(role, rate_of_others)
            if not self._sends_role[role]:
                left_out.append(record.id)
        self._left_out.update(left_out)
        self._collector.leave_out(len(left_out))

    def _take_held(self, ids: Iterable[str | None]) -> list[Record]:
        """Remove the messages and segments with these ids from the held ones, and return them. None stands for no
        message."""
        removed: list[Record] = []
        for id in dict.fromkeys(ids):
            if id and id in self._held:
                removed.append(self._held.pop(id))
        if not self._held:
            self._size = 0
        return removed

    def _take_path(self, prompt: str | None) -> list[Record]:
        """Remove the held segments of a prompt's token path, and return them."""
        path: list[str] = []
        segment_id = prompt
        while segment_id is not None:
            segment = self._held.get(segment_id)
            if not isinstance(segment, Segment):  # it was sent before, and so were all before it
                break
            path.append(segment_id)
            segment_id = segment.parent
        return self._take_held(path)


def _needed_ids(call: CallRecord) -> list[str | None]:
    """The ids of messages that a call refers to."""
    grammar = call.sampling.get("grammar")
    names = [*call.messages, *call.sent, call.tools, call.sent_tools, call.sent_format]
    return [*names, grammar if isinstance(grammar, str) else None]
