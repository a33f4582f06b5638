"""Grammars are tried in another process: what they cost there, and what becomes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cotune.errors import RequestRefused
from cotune.integrations.models.chat import grammar, grammar_worker
from cotune.integrations.models.chat.grammar import Grammars
from cotune.integrations.models.chat.grammar_trial import Trials
from cotune.integrations.models.chat.reply_grammar import json_grammar, unenforceable
from tests.integrations.tiny_models import tokenizer


def integers(count: int) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "integer"}, "minItems": count, "maxItems": count}


def text(schema: Any) -> str:
    return f"start: {json_grammar(schema)}"


@pytest.fixture(scope="module")
def trials() -> Trials:
    made = tokenizer()
    return Grammars(made, len(made)).trials


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (integers(3), ""),
        ({"type": "string", "pattern": "^(a|b)+$"}, ""),
        (integers(10**9), "it takes more than 64 MiB to prepare"),
        (integers(10**7), "it takes more than"),
        ({"enum": ["x" * 100] * 12_000}, "its schemas take 1248118 characters, and at most 1048576 are read"),
        ({"not": {"type": "string"}}, "failed to compile JSON schema: Unimplemented keys"),
    ],
)
def test_a_grammar_is_refused_for_what_it_costs(trials: Trials, schema: Any, fault: str) -> None:
    found = trials.fault(text(schema))
    assert found.startswith(fault) and bool(found) == bool(fault), found
    worker = trials._worker
    assert worker is not None and worker.poll() is None, "a fork of the process was ended, not the process"


def test_a_process_that_has_ended_is_started_again(trials: Trials) -> None:
    assert trials.fault(text(integers(1))) == ""
    worker = trials._worker
    assert worker is not None
    worker.kill()
    worker.wait()
    assert trials.fault(text(integers(2))) == ""
    assert trials._worker is not None and trials._worker.pid != worker.pid


def test_what_was_tried_is_not_tried_again(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    for schema in (integers(4), integers(10**9)):
        found = trials.fault(text(schema))
        with monkeypatch.context() as patched:
            patched.setattr(trials, "_ask", None)
            assert trials.fault(text(schema)) == found


def test_a_process_that_cannot_start_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = Trials({"json": "x" * (1 << 20)}), text(integers(1))
    dies = tmp_path / "dies.py"
    dies.write_text("raise SystemExit(3)")
    with monkeypatch.context() as patched:
        patched.setattr(grammar_worker, "__file__", str(dies))
        assert made.fault(asked) == "the process that tries it ended (status 3)"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "none"))
        assert "No such file or directory" in made.fault(asked)
    made._description = None
    assert made.fault(asked) == "", "once it starts again"


def test_memory_that_others_take_meanwhile_counts_up_to_a_limit_and_the_grammar_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, compiled = [0], []
    monkeypatch.setattr(grammar, "process_memory", lambda: memory[0])

    class BesideOthers(Grammars):
        def _compile(self, grammar: str) -> Any:
            memory[0] += 1 << 30
            compiled.append(grammar)
            return super()._compile(grammar)

    made = tokenizer()
    grammars = BesideOthers(made, len(made))
    for _ in range(2):
        grammars.start(text(integers(1)))
    assert grammars._compiled.bytes == grammar.BYTES and len(compiled) == 1


@pytest.mark.parametrize("schema", [integers(10**9), integers(3)])
def test_a_schema_is_tried_without_a_model_too(schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    found = unenforceable({"response_format": form}, None)
    assert bool(found) == (schema["minItems"] > 3)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_a_schema_that_is_nested_too_deeply_is_refused(trials: Trials) -> None:
    assert trials.fault(text(nested(60))) == ""
    for depth in (101, 300, 5000):
        with pytest.raises(RequestRefused, match="nested more than 100 deep"):
            json_grammar(nested(depth))
