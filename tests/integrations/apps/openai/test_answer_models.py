"""Threads that parse the first answers of a process at once. Each case needs a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, threading
import httpx, openai, pydantic
import cotune

kind = sys.argv[1]
sys.setswitchinterval(1e-5)  # so that threads change places while one completes a model

class Parsed(pydantic.BaseModel):
    a: int

call = {"id": "f", "type": "function", "function": {"name": "f", "arguments": "{}"}}
choice = {
    "index": 0,
    "finish_reason": "stop",
    "message": {"role": "assistant", "content": '{"a": 1}', "tool_calls": [call]},
}
chat = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
text = {"type": "output_text", "text": '{"a": 1}', "annotations": []}
message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
response = {
    "id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [message],
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
}
transport = httpx.MockTransport(lambda request: httpx.Response(200, json=chat if "chat" in kind else response))
client = openai.OpenAI(api_key="none", http_client=httpx.Client(transport=transport))
asked = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
ask = {
    "chat": lambda: client.chat.completions.create(**asked).model_dump(),
    "parsed chat": lambda: client.chat.completions.parse(**asked, response_format=Parsed),
    "parsed response": lambda: client.responses.parse(model="m", input="go", text_format=Parsed),
    "beta response": lambda: client.beta.responses.create(model="m", input="go").model_dump(),
}[kind]
start = threading.Barrier(8)
errors = []

def first_answer():
    start.wait()
    try:
        ask()
    except Exception as error:
        errors.append(error)

threads = [threading.Thread(target=first_answer) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("\\n".join(map(repr, errors)) or None)
"""


@pytest.mark.parametrize("kind", ["chat", "parsed chat", "parsed response", "beta response"])
def test_threads_parse_the_first_answers_of_a_process_at_once(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
