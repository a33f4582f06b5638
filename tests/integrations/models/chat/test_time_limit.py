"""What runs for too long is ended in its own thread, and nothing else is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from cotune.errors import ConfigError, SamplerError
from cotune.integrations.models.chat import template as chat_format
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.time_limit import TookTooLong, time_limit
from tests.integrations import tiny_models

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}" + 3 * "{% endfor %}"


def test_work_that_takes_too_long_ends_in_its_thread_and_no_other() -> None:
    ended: list[str] = []

    def busy(name: str, seconds: float, work: float) -> None:
        try:
            with time_limit(seconds):
                until = time.monotonic() + work
                while time.monotonic() < until:
                    pass
        except TookTooLong:
            ended.append(f"{name} too long")
        else:
            ended.append(name)

    works = [("loop", 0.3, 60), ("short", 30, 0.05), ("other loop", 0.3, 60)]
    threads = [threading.Thread(target=busy, args=work) for work in works]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["loop too long", "other loop too long", "short"]
    assert time.monotonic() - started < 55


def test_work_that_ends_in_time_is_left_alone() -> None:
    for _ in range(300):
        with time_limit(0.5):
            pass
    time.sleep(1.0)  # whatever was on its way would arrive here


def test_work_that_swallows_its_end_goes_on() -> None:
    started = time.monotonic()
    with time_limit(0.1):
        try:
            while time.monotonic() < started + 120:
                pass
        except TookTooLong:
            pass
    assert time.monotonic() - started < 60


def test_a_template_that_loops_for_one_prompt_fails_that_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_format, "PATIENCE", 1.0)
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = (
        f"{{% if messages[0].content == 'loop' %}}{LOOP}{{% endif %}}{{{{ messages[0].content }}}}"
    )
    chat = ChatTemplate(tokenizer, [2])
    with pytest.raises(SamplerError, match=r"did not end within 1 s"):
        chat.render([{"role": "user", "content": "loop"}], None)
    assert chat.render([{"role": "user", "content": "on"}], None)


def test_a_model_whose_template_loops_is_refused_at_the_start(
    contract_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in contract_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(LOOP)
    monkeypatch.setattr(chat_format, "PATIENCE", 1.0)
    with pytest.raises(ConfigError, match=r"render a message within 1 s.* Correct the chat template") as caught:
        ChatTemplate.load(tmp_path)
    assert caught.value.field == "model"
