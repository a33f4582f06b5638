"""The interface of a collector, and the records that a trace sends to it: all, or a share by role."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

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
        # One share decides here about the whole episode. Shares by role decide at the first call of each role; without
        # any role, everything is sent.
        self._rates: Mapping[str, float] = {}
        if isinstance(rates, Mapping):
            self._rates = rates
            self._sends_all = not rates
        else:
            self._sends_all = random.random() < rates
        self._drawn: dict[str, bool] = {}
        """Whether the calls of a role are sent, by role."""
        self._left_out: set[str] = set()
        """Ids of calls that were left out."""
        self._held: dict[str, Message | Segment] = {}
        """Messages and segments that have not been sent: a later call may need them."""
        self._size = 0
        """Approximate size of `_held` in bytes."""
        self._lock = threading.Lock()

    def write(self, records: Sequence[Record]) -> None:
        if not self._sends_all:
            records = self._apply_rates(records)
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

    def _apply_rates(self, records: Sequence[Record]) -> list[Record]:
        """The records to send, each after the messages and segments of tokens that it needs.

        Messages and segments are held back until a call that is sent needs them: calls that are left out may be the
        only ones that use them. An episode that is left out as a whole has no records.
        """
        sampled: list[Record] = []
        with self._lock:
            self._choose_left_out(records)
            if not self._rates:  # the whole episode is left out
                return sampled
            for record in records:
                if isinstance(record, Message | Segment):
                    self._held[record.id] = record
                    self._size += len(record.packed) if isinstance(record, Segment) else len(repr(record.body))
                elif isinstance(record, CallRecord):
                    if record.id not in self._left_out:
                        sampled += [*self._take_held(_needed_ids(record)), *self._take_path(record.prompt), record]
                elif isinstance(record, Episode):
                    needed = [*(result.value for result in record.results), record.chance]
                    sampled += [*self._take_held(needed), record]
                else:  # a reward of an episode, or of a call's candidate, whose id begins with the id of the call
                    target = record.target.partition(".")[0]
                    if target not in self._left_out:
                        sampled.append(record)
            if self._size > MOST_HELD_BYTES:
                sampled += self._take_held(list(self._held))
        return sampled

    def _choose_left_out(self, records: Sequence[Record]) -> None:
        """Choose the calls that are not sent, by the rates of their roles, and count them at the collector."""
        left_out: list[str] = []
        for record in records:
            if not isinstance(record, CallRecord):
                continue
            role = record.role
            if self._rates and role not in self._drawn:  # drawn once, at the first call of the role
                self._drawn[role] = random.random() < self._rates.get(role, self._rates.get("*", 1.0))
            if not self._rates or not self._drawn[role]:
                left_out.append(record.id)
        self._left_out.update(left_out)
        self._collector.leave_out(len(left_out))

    def _take_held(self, names: Iterable[str | None]) -> list[Record]:
        """Remove these messages and segments from the held ones, and return them."""
        removed: list[Record] = []
        for name in dict.fromkeys(names):
            if name and name in self._held:
                removed.append(self._held.pop(name))
        if not self._held:
            self._size = 0
        return removed

    def _take_path(self, prompt: str | None) -> list[Record]:
        """Remove the held segments of a prompt's token path, and return them."""
        names: list[str] = []
        while prompt is not None:
            segment = self._held.get(prompt)
            if not isinstance(segment, Segment):  # it was sent before
                break
            names.append(prompt)
            prompt = segment.parent
        return self._take_held(names)


def _needed_ids(call: CallRecord) -> list[str | None]:
    """The ids of messages that a call refers to."""
    grammar = call.sampling.get("grammar")
    names = [*call.messages, *call.sent, call.tools, call.sent_tools, call.sent_format]
    return [*names, grammar if isinstance(grammar, str) else None]
