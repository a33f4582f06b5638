"""Every error that cotune raises on purpose: each names the cause and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class CotuneError(Exception):
    """Base of all cotune errors. `cause` is what happened, `remedy` what the user can do about it.

    ```python
    try:
        cotune.train(solve, "tasks.jsonl", model="no/such-model")
    except cotune.CotuneError as error:
        print(error.cause, error.remedy)
    ```
    """

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{cause} {remedy}".strip())

    def __reduce__(self) -> tuple[Callable[..., CotuneError], tuple[type[CotuneError], str, dict[str, Any]]]:
        """Crosses processes whole, whatever the arguments of its class."""
        return _restore_error, (type(self), str(self), self.__dict__)


def install_extra(extra: str) -> str:
    """The command that installs an extra, as a remedy. cotune is not in a package index, so pip needs its source
    folder."""
    return f"In cotune's source folder, run: pip install -e '.[{extra}]'"


def error_text(error: BaseException) -> str:
    """The class and the text of an error; only the class if it has no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def error_line(error: BaseException) -> str:
    """An error in one line without a full stop: the cause of a CotuneError, else the class and the first line of the
    text, or of the text of its cause."""
    if isinstance(error, CotuneError):
        return error.cause.rstrip(".")
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not text and error.__cause__ is not None:
        return error_line(error.__cause__)
    return f"{type(error).__name__}: {text}".rstrip(": .")


def field_and_fault(error: Exception) -> tuple[str, str]:
    """The dotted path of the field ("" for the whole value) and the fault, from msgspec's ValidationError, which has
    both only in its text."""
    fault, _, where = str(error).partition(" - at `$")
    field = where.strip(".`")
    if named := re.search(r"(?:missing required|unknown) field `(.+)`", fault):
        field = f"{field}.{named[1]}".lstrip(".")
    return field, fault


_KINDS = {
    "object": "a table",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}


def expectation_clause(fault: str) -> str:
    """The clause for a ConfigError from the text of msgspec's ValidationError: "must be a number, not text"."""
    match = re.match(r"Expected `(.+)`, got `(.+)`$", fault)
    if match is None:
        return f"is not valid: {fault}"
    return f"must be {_kinds_text(match[1])}, not {_kinds_text(match[2])}"


def _kinds_text(kinds: str) -> str:
    """Kinds of values in words, from msgspec's names: "int | null"."""
    return " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | "))


def _restore_error(kind: type[CotuneError], message: str, fields: dict[str, Any]) -> CotuneError:
    error = kind.__new__(kind, message)
    error.__dict__.update(fields)
    return error


class ConfigError(CotuneError):
    """A setting is wrong. The error names the field, its value, the fault and the remedy.

    `fault` is a clause that follows "field = value", or only the field if the value is None: "must be 2 or more: a
    group of one has no baseline".
    """

    def __init__(self, field: str, value: object, fault: str, remedy: str = "") -> None:
        self.field = field
        self.value = value
        self.fault = fault
        setting = field if value is None else f"{field} = {value!r}"
        super().__init__(f"{setting} {fault}.", remedy)


def check_bounds(settings: object, *names: str, least: float | None = None, table: str = "") -> None:
    """Raise ConfigError for a field of `settings` that is a number below `least`; without `least`, for a number that is
    not above 0. `table` comes before the name in the error, for example "cluster."."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, int | float) and not (value > 0 if least is None else value >= least):
            raise ConfigError(
                table + name, value, "must be a number above 0" if least is None else f"must be {least:g} or more"
            )


class WorkflowError(CotuneError):
    """The user's workflow or scorer raised, or returned something that is not a reward."""


class TooManyCalls(WorkflowError):
    """An episode has made the maximum number of calls. This is a failure of the policy, whose answers did not end
    it."""


class Outage(CotuneError):
    """Raise it in a workflow or a tool if a service is down. The episode is then left out and counted as `outage`.

    Other errors of a tool count as a failure of the policy, whose arguments may be the cause.

    ```python
    @cotune.workflow
    async def careful(task):
        try:
            return await solve(task)
        except ConnectionError as error:
            raise cotune.Outage("The search service is down.") from error
    ```
    """


class JudgeError(WorkflowError):
    """A judge gave no usable answer, cannot be reached, or has used up its budget."""


class RecordError(CotuneError):
    """A record breaks an invariant of the data model, or the store cannot serve it."""


class ReplayDiverged(CotuneError):
    """A request of a repeated episode differs from the record. `role` and `turn` identify the call."""

    def __init__(self, role: str, turn: int, cause: str, remedy: str = "") -> None:
        self.role = role
        self.turn = turn
        super().__init__(cause, remedy)


class GroupError(CotuneError):
    """Candidates were put into a group that they do not belong to, or a step has no usable group."""


class SamplerError(CotuneError):
    """The sampler cannot serve a request: unknown policy version, prompt too long, engine gone."""


class SampleTimeout(SamplerError):
    """A request took longer than its time-out. Its partial tokens are discarded."""


class RequestRefused(SamplerError):
    """A healthy engine refuses this request (too long, unknown version), and so would every other engine."""


class PromptTooLong(RequestRefused):
    """A prompt leaves no room for a reply in the model's context."""


class EngineLost(SamplerError):
    """Too few engines are left, and their restarts are used up: no request can be served."""


class LearnerError(CotuneError):
    """An update did not train what it should: a tensor without optimizer or gradient, or non-finite numbers."""


class LearnerLost(LearnerError):
    """A learner's process died or hangs. It can be restarted and then continues from the last checkpoint."""


class SyncError(CotuneError):
    """The weights that arrived at the sampler differ from the weights that the learner sent."""


class GapError(SyncError):
    """The log-probabilities of the sampler differ from the learner's by `gap` nats per token."""

    def __init__(self, gap: float, cause: str, remedy: str = "") -> None:
        self.gap = gap
        super().__init__(cause, remedy)


class AdapterError(CotuneError):
    """An export cannot be loaded: wrong base, wrong hash, missing or unknown role."""


class RunError(CotuneError):
    """The run folder cannot be used: another process has locked it, it is broken, or its configuration differs."""


class UntrustedFolderError(RunError):
    """A folder that this user did not write on this machine names code or addresses. `orders` are all its settings of
    this kind, `used_orders` are the ones that the command would use."""

    def __init__(self, folder: Path, used_orders: Mapping[str, str], orders: Any) -> None:
        """`used_orders` are the settings that the command would follow, with their values; `orders` are all orders of
        the folder (`FolderOrders`), to remember them if the user agrees."""
        listed = "; ".join(f"{name}: {value}" for name, value in used_orders.items())
        super().__init__(
            f"{folder} was not written by you on this machine, and it chooses code or addresses: {listed}.",
            "If you trust all of them, pass --trust-folder, or set COTUNE_TRUST_FOLDERS to a folder above it. Or pass "
            "these settings yourself on the command line.",
        )
        self.folder = str(folder)
        self.used_orders = dict(used_orders)
        self.orders = orders
