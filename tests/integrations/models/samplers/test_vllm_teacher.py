"""What a teacher by URL asks a server, and what it makes of servers that fail, lie, or are another's."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, LearnerError
from cotune.integrations.models.vllm import teacher
from cotune.integrations.models.vllm.teacher import VllmTeacher
from tests.integrations.models.samplers.test_vllm_http import FakeServer


def row(*response: int, prompt: tuple[int, ...] = (3, 4), **more: Any) -> TrainRow:
    logprobs = (-1.0,) * len(response)
    return TrainRow(
        id="c.0", role="a", prompt_ids=prompt, response_ids=response, logprobs=logprobs, advantage=0.0, **more
    )


def scored(body: dict[str, Any]) -> tuple[int, Any]:
    """Of token i the log-probability is -i / 10, and the likeliest has -0.5."""
    places = [{str(i): {"logprob": -i / 10, "rank": 9}, "0": {"logprob": -0.5, "rank": 1}} for i in body["prompt"]]
    return 200, {"choices": [{"index": 0, "prompt_logprobs": [None, *places[1:]]}]}


@pytest.fixture(scope="module")
def tokenizer(contract_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(contract_model)


@pytest.fixture
def server(contract_model: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(teacher, "PAUSE", 0.01)
    fake = FakeServer(contract_model)
    fake.answers["POST", "/detokenize"] = lambda body: (200, {"prompt": tokenizer.decode(body["tokens"])})
    fake.answers["POST", "/v1/completions"] = scored
    del fake.answers["GET", "/v1/load_lora_adapter"]
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture
def asked(server: FakeServer, tokenizer: Any) -> Iterator[VllmTeacher]:
    opened = VllmTeacher(server.url + "/v1", tokenizer, timeout=60.0, concurrency=3)
    server.asked.clear()
    yield opened
    opened.close()


def test_no_request_is_made_after_it_is_closed(server: FakeServer, asked: VllmTeacher) -> None:
    def closes(body: dict[str, Any]) -> tuple[int, Any]:
        asked.close()
        return scored(body)

    server.answers["POST", "/v1/completions"] = closes
    with pytest.raises(LearnerError, match="no longer answers: "):
        asked.logprobs([row(5, 6, 7) for _ in range(20)])
    assert len(server.asked) <= asked.concurrency


def test_the_scores_of_a_row_are_those_of_its_response(server: FakeServer, asked: VllmTeacher) -> None:
    found = asked.logprobs([row(5, 6, 7), row(8, prompt=(1,))])
    np.testing.assert_allclose(np.concatenate([x for x in found if x is not None]), [-0.5, -0.6, -0.7, -0.8])
    bodies = sorted(server.asked, key=lambda body: -len(body["prompt"]))
    assert [body["prompt"] for body in bodies] == [[3, 4, 5, 6, 7], [1, 8]]
    assert {(body["model"], body["prompt_logprobs"], body["max_tokens"]) for body in bodies} == {("base", 0, 1)}


def test_no_more_requests_at_once_than_allowed(server: FakeServer, asked: VllmTeacher) -> None:
    now, most, lock, three = [0], [0], threading.Lock(), threading.Barrier(3)

    def slow(body: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        three.wait(60)
        time.sleep(0.05)  # for a fourth to come
        with lock:
            now[0] -= 1
        return scored(body)

    server.answers["POST", "/v1/completions"] = slow
    callers = [threading.Thread(target=asked.logprobs, args=([row(5)] * 6,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert most == [3]


def test_a_server_with_adapters_is_asked_one_row_at_a_time(server: FakeServer, tokenizer: Any) -> None:
    """vLLM 0.28 on CPUs ends where it scores two prompts at once beside adapters."""
    base = {"id": "base", "max_model_len": 512}
    server.answers["GET", "/v1/models"] = (200, {"data": [base, {"id": "tuned", "parent": "base"}]})
    listed = VllmTeacher(server.url, tokenizer)
    server.answers["GET", "/v1/models"] = (200, {"data": [base]})
    server.answers["GET", "/v1/load_lora_adapter"] = (405, {})
    loadable = VllmTeacher(server.url, tokenizer)
    assert listed.concurrency == loadable.concurrency == 1
    for opened in (listed, loadable):
        opened.close()


def test_a_request_that_fails_is_made_again_and_counted(server: FakeServer, asked: VllmTeacher) -> None:
    times: Counter[str] = Counter()

    def moody(body: dict[str, Any]) -> tuple[int, Any]:
        times[str(body["prompt"])] += 1
        return scored(body) if times[str(body["prompt"])] == 3 else (503, {"error": {"message": "busy"}})

    server.answers["POST", "/v1/completions"] = moody
    found = asked.logprobs([row(5), row(6)])
    assert [None if x is None else x.tolist() for x in found] == [[-0.5], [pytest.approx(-0.6)]]
    assert asked.counters == {"requests": 7, "retried": 4, "unscored": 0}


def test_rows_that_cannot_be_scored_are_left_out_and_counted(
    server: FakeServer, asked: VllmTeacher, caplog: pytest.LogCaptureFixture
) -> None:
    def strict(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["prompt"]) > 4:
            return 400, {"error": {"message": "longer than the model's context"}}
        return (200, {"choices": []}) if 9 in body["prompt"] else scored(body)

    server.answers["POST", "/v1/completions"] = strict
    rows = [row(5), row(5, 6, 7), row(9), row(5, temperature=0.7), row(5, grammar="start: /a/"), row(99999)]
    with caplog.at_level(logging.WARNING, "cotune"):
        found = asked.logprobs(rows)
    assert [x is None for x in found] == [False, True, True, True, True, True]
    assert asked.counters["unscored"] == 5 and asked.counters.get("retried", 0) == 0
    assert len(server.asked) == 4, "rows that were drawn otherwise than a server scores are not sent"
    for said in ("answered 400: longer than the model's context", "not about the tokens that were sent",
                 "2 rows, which are left out: drawn at another temperature", "no probability at all"):  # fmt: skip
        assert said in caplog.text


@pytest.mark.parametrize("rows", [2, 40])
def test_a_server_that_dies_ends_the_update_soon(server: FakeServer, asked: VllmTeacher, rows: int) -> None:
    server.answers["POST", "/v1/completions"] = (500, {"error": {"message": "the engine is dead"}})
    what = "no longer answers" if rows == 40 else "has scored none of 2 rows"
    with pytest.raises(LearnerError, match=rf"The teacher {server.url} {what}: .* answered 500.*--resume"):
        asked.logprobs([row(5)] * rows)
    assert len(server.asked) <= 3 * min(rows, 5), "three times each; two more rows may begin before three have failed"


def test_an_answer_in_another_form_ends_the_update_at_once(server: FakeServer, asked: VllmTeacher) -> None:
    server.answers["POST", "/v1/completions"] = (200, b"<html>a proxy</html>")
    with pytest.raises(LearnerError, match=r"has scored none of 2 rows: .*/v1/completions answered in another form"):
        asked.logprobs([row(5)] * 2)
    assert len(server.asked) == 2 and "retried" not in asked.counters


def test_a_server_that_hangs_is_a_matter_of_the_time_out(server: FakeServer, tokenizer: Any) -> None:
    opened = VllmTeacher(server.url, tokenizer, timeout=0.5, concurrency=2, retries=1)
    over = threading.Event()
    server.answers["POST", "/v1/completions"] = lambda body: (over.wait(20), scored(body))[1]
    with pytest.raises(LearnerError, match=r"no longer answers: .* does not answer: ReadTimeout"):
        opened.logprobs([row(5)] * 6)
    assert 4 <= opened.counters["timeouts"] <= 6
    over.set()
    opened.close()


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/version", (404, {}), "is not a vLLM server"),
        ("/version", (401, {}), "needs a key .* Put it into VLLM_API_KEY"),
        ("/v1/models", (200, {"data": []}), "serves no model"),
        ("/detokenize", (200, {"prompt": "abc"}), "base reads the tokens 0 to .* differently. Serve a larger model"),
        (
            "/detokenize",
            (400, {"error": {"message": "no such token"}}),
            r"cannot score tokens .* 400: no such to",
        ),
        ("/v1/completions", (200, b"<html>"), "answered in another form"),
        (
            "/v1/completions",
            (200, {"choices": [{"prompt_logprobs": [None, *[{"0": {"logprob": 9.5}}] * 2]}]}),
            "does not give log-probabilities. Start it with --logprobs-mode raw_logprobs",
        ),
    ],
)
def test_servers_that_cannot_teach_are_refused(
    server: FakeServer, tokenizer: Any, path: str, answer: Any, message: str
) -> None:
    server.answers["GET" if path in ("/version", "/v1/models") else "POST", path] = answer
    with pytest.raises(ConfigError, match=rf"distill.teacher = '{server.url}' .*{message}"):
        VllmTeacher(server.url, tokenizer)


def test_no_server_at_all(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot score tokens .* does not answer: ConnectError"):
        VllmTeacher("http://127.0.0.1:9", tokenizer)
