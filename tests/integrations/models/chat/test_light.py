"""The chat format without torch gives the same ids, and leaves transformers whole for the application."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.tiny_models import tokenizer

CODE = """
import sys
from cotune.records.ids import pack_ids
from cotune.integrations.models.chat.formats import load_formats, without_torch
from cotune.integrations.models.chat.template import ChatTemplate

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASKED = [{"role": "user", "content": "hello"}]

def work(chat):
    prompt = chat.render(ASKED, TOOLS)
    reply = chat._encode('so <tool_call>{"name": "look", "arguments": {}}</tool_call>')
    text, message, finish = chat.parse(reply, tools=TOOLS)
    assert finish == "tool_calls"
    call = message["tool_calls"][0] | {"id": "1"}
    told = [*ASKED, message | {"tool_calls": [call]}, {"role": "tool", "content": "seen", "tool_call_id": "1"}]
    onward = chat.render(told, TOOLS, earlier=[pack_ids([*prompt, *reply]), pack_ids(prompt)])
    assert chat.counts["extended"] == 1
    return prompt, onward, text, chat.end_token_ids

def load_light():
    with without_torch():
        return load_formats({sys.argv[1]: []}).own

light = load_light()
seen = work(light)
assert not {"torch", "transformers"} & set(sys.modules)
from transformers import PreTrainedModel
import torch
assert issubclass(PreTrainedModel, torch.nn.Module)
assert work(ChatTemplate.load(sys.argv[1])) == seen
light.counts.clear()
assert work(light) == seen
assert work(load_light()) == seen
"""


@pytest.mark.slow
def test_the_same_without_torch(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 2}')
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "PyTorch" not in done.stderr


AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from cotune.integrations.models.chat.template import ChatTemplate

sys.setswitchinterval(1e-5)
with ThreadPoolExecutor(4) as pool:
    assert len({chat.end_token_ids for chat in pool.map(ChatTemplate.load, sys.argv[1:] * 4)}) == 1
"""


@pytest.mark.slow
def test_templates_may_be_loaded_at_once(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "eos_token_id": 2}')
    done = subprocess.run([sys.executable, "-c", AT_ONCE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
