"""The shared part of the gallery's applications: a small base model, and the way from it to a measured gain.

Each file of this folder is an application in the style of its framework. Below it are the additions for cotune: the
workflow, a scorer, and `expert`, which knows the right answer to every request. The base model is a Qwen3 of 0.3M
parameters from scratch. It learns the form of the conversation from `expert`, which is wrong in a part of its answers,
as a pretrained model would be. Then `cotune train` does the rest:

    python -m examples.gallery.autogen_team --out runs/gallery/autogen_team
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENAI_API_KEY", "none")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from cotune.storage.sqlite_store import SqliteStore
from cotune.types import Call, Candidate
from examples.tool_agent.provider import serving

Message = dict[str, Any]
Expert = Callable[[Sequence[Mapping[str, Any]]], Message]
"""The right answer to the messages of a request."""
Wrong = Callable[[random.Random, Sequence[Mapping[str, Any]]], Message]
"""A random answer to them that is usually wrong."""
WARM_TASKS, TASKS, HELD_OUT = 160, 400, 100
WARM_STEPS, STEPS = 300, 10
MARKS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
PIECES = r"\w+|\n|[^\w\n]+"
"""A token is a word, a number, an end of line, or a run of signs and spaces."""
TEMPLATE = (
    "{%- if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function.name }}"
    "({{ t.function.parameters.properties | join(' ') }}) {% endfor %}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{% set f = call.function %}"
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


def says(text: str) -> Message:
    """An answer in words."""
    return {"role": "assistant", "content": text}


def calls(tool: str, **arguments: str) -> Message:
    """An answer that calls a tool."""
    call = {"id": f"call_{tool}", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def heard(messages: Sequence[Mapping[str, Any]], role: str) -> list[str]:
    """The texts of all messages of this role."""
    return [str(message.get("content") or "") for message in messages if message["role"] == role]


def agrees(candidate: Candidate, call: Call, expert: Expert) -> float:
    """A reward: 1 where a candidate is the expert's answer, -1 for a tool call that cannot be read, else 0."""
    if candidate.malformed:
        return -1.0
    right = expert(call.messages)
    return float(_plain(candidate.text, candidate.tool_calls) == _plain(right["content"], right.get("tool_calls")))


def _plain(text: str | None, tool_calls: Sequence[Mapping[str, Any]] | None) -> tuple[str, list[Any]]:
    functions = [call["function"] for call in tool_calls or ()]
    called = [(function["name"], json.loads(function["arguments"] or "{}")) for function in functions]
    return "" if called else (text or "").strip(), called


def erring(expert: Expert, wrong: Wrong, share: float, seed: int) -> Expert:
    """The expert with a share of wrong answers: the same ones for the same questions, in whatever order they come."""
    times: Counter[str] = Counter()

    def answers(messages: Sequence[Mapping[str, Any]]) -> Message:
        text = json.dumps([messages, seed])
        times[text] += 1
        chance = random.Random(f"{text} {times[text]}")
        return wrong(chance, messages) if chance.random() < share else expert(messages)

    return answers


def conversations(records: Path) -> list[tuple[str, str]]:
    """Each recorded call as a model reads it: the prompt, and the prompt with its answer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    written = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, "?")))
    rendered = partial(written.apply_chat_template, chat_template=TEMPLATE, tokenize=False)
    texts: list[tuple[str, str]] = []
    with closing(SqliteStore.open(records, read_only=True)) as store:
        for call in (call for episode in store.episodes() for call in store.calls(episode.id)):
            tools = store.message(call.tools) if call.tools else None
            messages = [_for_template(store.message(message)) for message in call.messages]
            answered = [*messages, _for_template(call.candidates[0].message)]
            opened = rendered(messages, tools=tools, add_generation_prompt=True)
            texts.append((opened, rendered(answered, tools=tools).rstrip("\n")))
    return sorted(texts)


def build_tokenizer(texts: Iterable[str]) -> Any:
    """A tokenizer with a token for each word, number and run of signs of the texts."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    parts = {part for text in texts for part in re.split("|".join(map(re.escape, MARKS)), text)}
    pieces = sorted({piece for part in parts for piece in re.findall(PIECES, part)})
    vocabulary = dict.fromkeys([*MARKS, "?", *map(str, range(100)), *pieces])
    inner = Tokenizer(models.WordLevel({token: place for place, token in enumerate(vocabulary)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(MARKS[:3])
    inner.add_tokens(MARKS[3:])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build(records: Path, folder: Path, steps: int, seed: int) -> None:
    """Build a base model of the recorded calls of an application, and save it."""
    import torch

    from examples.tiny_model import UNLABELLED, Row, build_model, warm_up

    torch.set_num_threads(1)
    shown = conversations(records)
    tokenizer = build_tokenizer(text for _, text in shown)
    rows: list[Row] = []
    for texts in shown:
        prompt, whole = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        rows.append((whole, [UNLABELLED] * len(prompt) + whole[len(prompt) :]))
    model = build_model(tokenizer, seed)

    def report(step: int, loss: float) -> None:
        if step == steps:
            print(f"base of {len(rows)} calls, {len(tokenizer)} tokens: loss {loss:.2f}", flush=True)

    warm_up(model, rows, random.Random(seed), steps=steps, batch=24, lr=5e-3, report=report)
    model.config.max_position_embeddings = 2048  # rotary positions: no weight depends on it
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _for_template(message: Mapping[str, Any]) -> Message:
    """Arguments of tool calls as objects, which the template writes as JSON."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    made = [{"function": {"name": f["name"], "arguments": json.loads(f["arguments"])}} for f in functions]
    return {**message, "tool_calls": made} if made else dict(message)


def cotune(*words: str, **environment: str) -> None:
    """Run a cotune command in a process of its own, and show it."""
    print("$ cotune", *words, flush=True)
    subprocess.run([sys.executable, "-m", "cotune", *words], env={**os.environ, **environment}, check=True)


def record(name: str, answers: Expert, tasks: Iterable[Mapping[str, Any]], out: Path) -> None:
    """Record an application in the folder `out`, with something that answers its requests in place of a provider."""
    file = out.with_suffix(".jsonl")
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with serving(answers=answers) as url:
        cotune("trace", f"{name}:solve", "--tasks", str(file), "--out", str(out), OPENAI_BASE_URL=url)


def improve(name: str, wrong: Wrong, erring_in: float = 0.5) -> None:
    """Take an application from a base model to a better one. `name` is its module."""
    parser = argparse.ArgumentParser(description=importlib.import_module(name).__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    module, out, seed = importlib.import_module(name), options.out, options.seed
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    teacher = erring(module.expert, wrong, erring_in, seed)
    record(name, teacher, module.tasks(WARM_TASKS, 10 * seed + 1), records := out / "warm")
    for file, count, drawn in (("tasks", TASKS, 2), ("held_out", HELD_OUT, 3)):
        lines = [json.dumps(task) + "\n" for task in module.tasks(count, 10 * seed + drawn)]
        (out / f"{file}.jsonl").write_text("".join(lines))
    build(records, out / "base", WARM_STEPS, seed)
    of_model = ("--lr", "3e-3", "--set", "sampling.max_tokens=48", "--set", "lora.rank=16")
    of_machine = ("--set", "evaluation.tasks=none")
    workflow, run = f"{name}:solve", str(out / "run")
    tasks = ("--tasks", str(out / "tasks.jsonl"), "--tasks-per-step", "24", "--steps", str(options.steps), "-k", "8")
    cotune("train", workflow, *tasks, "--model", str(out / "base"), "--out", run, *of_model, *of_machine)
    cotune("eval", workflow, "--tasks", str(out / "held_out.jsonl"), "--run", run, "--modes", "base,trained")
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{name}: {time.monotonic() - started:.0f} s in all, {used:.0f} s of processor time")
