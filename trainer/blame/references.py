"""References: models, prompts and texts that answer in place of a role's own model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from cotune.adapters.prompts import prompts_of
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError
from cotune.integrations.apps.openai.other_model import OtherModel, check_address
from cotune.prompts.edits import Prompts
from cotune.prompts.file import read_prompts
from cotune.recording.recorder import LiveCall, Responder
from cotune.records.answers import Answer
from cotune.records.structs import Candidate
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.blame.arms import Arm
from cotune.trainer.blame.options import BlameOptions, split_reference
from cotune.trainer.evaluation.policies import answering
from cotune.trainer.evaluation.sources import read_source, read_trained

Kind = Literal["provider", "prompts", "policies", "model", "text"]


@dataclass(frozen=True)
class Reference:
    """Who answers in place of a role.

    `name` is a provider's model, a folder, a model on this machine, or a fixed text, depending on `kind`. `role` is ""
    for all roles without a reference of their own.
    """

    kind: Kind
    name: str
    role: str = ""

    @property
    def label(self) -> str:
        """The name of the reference in the report."""
        if self.kind == "text":
            return f"{self.name!r}" if self.name else "an empty answer"
        if self.kind == "prompts":
            return f"the prompts of {self.name}"
        return self.name


def read_references(options: BlameOptions, own: Responder | None = None) -> dict[str, Reference]:
    """The references of an analysis by role ("" for every other role), without loading or connecting any of them.

    `own` answers for the application as it is, in place of its provider. Raises ConfigError for a reference that does
    not exist, for two references of the same role, for prompts without an edit, for a `model` that does not exist, and
    for a `temperature` that cannot be set.
    """
    if options.temperature is not None:
        if own is not None:
            fault = "cannot be used with a responder, which draws its answers itself"
            raise ConfigError("temperature", options.temperature, fault, "Set the temperature in the responder.")
        if options.model is None:
            check_address("temperature", f"{options.temperature:g}")
    if options.model is not None:
        read_source(options.model, "model")
    references: dict[str, Reference] = {}
    for text in options.references:
        reference = _reference(text)
        if reference.role in references:
            roles = f"role {reference.role!r}" if reference.role else "all roles"
            raise ConfigError("reference", text, f"is the second one of {roles}", "Leave one of them out.")
        references[reference.role] = reference
    for text in options.without:
        role, _, answer = text.partition("=")
        if not role or role in references:
            fault = "names no role" if not role else "names a role twice"
            raise ConfigError("without", text, fault, "For example: --without checker, or --without checker=ok")
        references[role] = Reference("text", answer, role)
    return references


def _reference(text: str) -> Reference:
    """Read one --reference: [ROLE=]SOURCE, with openai:MODEL, prompts:FOLDER, a run, an export or a model as the
    source. Raises ConfigError."""
    role, source_text = split_reference(text)
    kind, _, name = source_text.partition(":")
    if kind == "openai":
        if not name:
            raise ConfigError("reference", text, "names no model", "For example: --reference openai:gpt-5")
        check_address()
        return Reference("provider", name, role)
    if kind == "prompts":
        if not read_prompts(name).id:
            raise ConfigError("reference", text, "has prompts that nobody has edited", "Edit some: cotune prompts edit")
        return Reference("prompts", name, role)
    source = read_source(source_text, "reference")
    return Reference("model" if source.kind == "model" else "policies", source_text, role)


@dataclass
class Answering:
    """Who answers the calls of a role, and the edited prompts that the calls are sent with."""

    responder: Responder | None = None
    """None leaves the calls to the application's own provider."""
    prompts: Prompts | None = None
    """None leaves the prompts as they are."""


@dataclass
class OpenReferences:
    """Who answers in each arm: `own` for roles as they are, and the references for swapped roles, "" for any role."""

    own: Answering
    references: Mapping[str, Answering]

    def of(self, role: str, arm: Arm) -> Answering:
        """Who answers the calls of a role in an arm, which swaps some of the roles to their references."""
        if arm.swaps(role):
            for name in (role, ""):  # "" stands for all roles without a reference of their own
                if name in self.references:
                    return self.references[name]
        return self.own

    def missing_policies(self, roles: Sequence[str]) -> list[str]:
        """A sentence for each of these roles for which its reference, a run or an export, has no policy."""
        sentences = []
        for role in roles:
            responder = self.of(role, Arm("all")).responder
            # An untrained model has no policy at all: it answers for every role.
            if not isinstance(responder, PolicyResponder) or not responder.policies or role in responder.policies:
                continue
            left_out = role in responder.provider_roles or responder.others is None
            who = "the application's own provider" if left_out else "its untrained model"
            sentences.append(f"The reference has no policy of {role}: {who} answers in its place.")
        return sentences

    def responder(self, arm: Arm) -> ArmResponder:
        """The responder for all calls of an episode of this arm."""
        return ArmResponder(self, arm)

    def prompts(self, arm: Arm) -> Prompts | None:
        """The prompts of an episode of this arm, a choice of the roles whose answers are swapped. Each role has the
        prompt parts of its answerer: the application's own model, or a reference. None if no part is edited."""
        # Several roles may have the same answerer, whose parts are read once.
        answerers = {id(answerer): answerer for answerer in (self.own, *self.references.values())}
        parts = []
        base: Prompts | None = None
        for answerer in answerers.values():
            if answerer.prompts is None:
                continue
            base = base or answerer.prompts  # for its other fields; its parts are replaced below
            for part in answerer.prompts.parts:
                roles = tuple(role for role in part.roles if self.of(role, arm) is answerer)
                if roles:
                    parts.append(msgspec.structs.replace(part, roles=roles))
        if base is None or not any(part.edited for part in parts):
            return None
        return msgspec.structs.replace(base, parts=tuple(parts))


class ArmResponder:
    """Answers the calls of an episode: the reference answers for swapped roles, and the others stay as they are."""

    def __init__(self, references: OpenReferences, arm: Arm) -> None:
        self._references = references
        self._arm = arm

    async def respond(self, call: LiveCall) -> Answer | None:
        """The answer, or None to leave the call to the application's own provider."""
        responder = self._references.of(call.role, self._arm).responder
        return None if responder is None else await responder.respond(call)


class FixedText:
    """Answers every call with the same text."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def respond(self, call: LiveCall) -> Answer:
        """An answer with the text."""
        message = {"role": "assistant", "content": self.text}
        return Answer(candidates=(Candidate(index=0, text=self.text, message=message),))


@contextlib.asynccontextmanager
async def open_references(
    workflow: Workflow, references: Mapping[str, Reference], options: BlameOptions, own: Responder | None
) -> AsyncIterator[OpenReferences]:
    """Load or connect the references and the model that answers for the application as it is.

    With `own`, this responder answers for the application as it is. Everything is closed with the context. Raises
    RunError, AdapterError, ConfigError, SyncError for weights that cannot be used.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def load_model(source: str, *, trained: bool) -> Answering:
            """Load a run or an export (`trained`), or an untrained model."""
            responder = await stack.enter_async_context(
                answering(
                    workflow,
                    policies=source if trained else None,
                    model=None if trained else source,
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                    seed=options.seed,
                    # All arms draw the same random numbers for the same call, so that less of a difference is luck.
                    stream="blame",
                )
            )
            return Answering(responder, prompts_of(read_trained(source, "reference").place) if trained else None)

        async def open_reference(reference: Reference) -> Answering:
            """Load or connect the source that answers for this reference."""
            if reference.kind == "text":
                return Answering(FixedText(reference.name))
            if reference.kind == "prompts":
                return Answering(as_is.responder, read_prompts(reference.name))
            if reference.kind == "provider":
                other_model = OtherModel(reference.name, options.temperature)
                stack.push_async_callback(other_model.aclose)
                return Answering(other_model)
            return await load_model(reference.name, trained=reference.kind == "policies")

        as_is = Answering(own, workflow.prompts)
        if own is None and options.model is not None:
            as_is = await load_model(options.model, trained=read_source(options.model, "model").kind != "model")
        elif own is None and options.temperature is not None:
            same_model = OtherModel(None, options.temperature)
            stack.push_async_callback(same_model.aclose)
            as_is = Answering(same_model, workflow.prompts)
        # A model that several roles are swapped to is loaded once.
        by_source: dict[tuple[Kind, str], Answering] = {}
        by_role: dict[str, Answering] = {}
        for role, reference in references.items():
            source = (reference.kind, reference.name)
            if source not in by_source:
                by_source[source] = await open_reference(reference)
            by_role[role] = by_source[source]
        yield OpenReferences(as_is, by_role)
