"""The names in use are those of the installed conventions."""

from __future__ import annotations

from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

from cotune.integrations.exchange.otel import names

KNOWN = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
OPERATIONS = {member.value for member in gen_ai_attributes.GenAiOperationNameValues}
OURS = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]


def test_attributes_are_those_of_the_conventions() -> None:
    used = {name for name in (*OURS, *names.PARAMS.values()) if name.startswith("gen_ai.")} - {names.EVALUATION}
    assert len(used) > 25 and used - KNOWN == set()
    assert names.ERROR_TYPE == error_attributes.ERROR_TYPE


def test_operations_are_those_of_the_conventions() -> None:
    assert {names.CHAT, names.AGENT, names.TOOL, names.WORKFLOW} <= OPERATIONS


def test_everything_else_is_under_our_own_name() -> None:
    operations = {names.CHAT, names.AGENT, names.TOOL, names.WORKFLOW}
    others = [name for name in OURS if not name.startswith("gen_ai.") and name not in operations]
    theirs = {name for name in others if not name.startswith("cotune.")}
    assert theirs == {names.SPAN_KIND, names.INPUT_VALUE, names.ERROR_TYPE}
