"""Every error that cotune raises on purpose: each names the cause and the remedy."""

from __future__ import annotations


class CotuneError(Exception):
    """Base of all cotune errors. `cause` is what happened, `remedy` what the user can do about it."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"{cause} {remedy}".strip())


class ConfigError(CotuneError):
    """A setting is wrong: names the field, its value, what is allowed and the remedy."""

    def __init__(self, field: str, value: object, allowed: str, remedy: str = "") -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} = {value!r}: allowed is {allowed}.", remedy)


class WorkflowError(CotuneError):
    """The user's workflow or scorer raised, or returned something that is not a reward."""


class RecordError(CotuneError):
    """A record breaks an invariant of the data model, or the store cannot serve it."""


class GroupError(CotuneError):
    """Candidates were put into a group that they do not belong to, or a step has no usable group."""


class SamplerError(CotuneError):
    """The sampler cannot serve a request: unknown policy version, prompt too long, engine gone."""


class SampleTimeout(SamplerError):
    """A request took longer than its time-out; its partial tokens are discarded."""


class LearnerError(CotuneError):
    """An update did not train what it should: a tensor without optimizer or gradient, or non-finite numbers."""


class SyncError(CotuneError):
    """Published weights did not arrive at the sampler as the learner sent them."""


class AdapterError(CotuneError):
    """An export cannot be loaded: wrong base, wrong hash, missing or unknown role."""


class RunError(CotuneError):
    """The run folder cannot be used: locked by another process, broken, or of another configuration."""
