"""Train the name maker by the preferences of a judge, and show its names before and after.

Twelve steps of 64 names, about ten seconds on one CPU core: python -m examples.judged.demo
"""

from __future__ import annotations

import os
import string
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cotune
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from examples.judged.products import make_tasks
from examples.judged.rule_judge import ease, judging
from examples.tiny_model import build_model

_TEMPLATE = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def build_base(folder: Path) -> Path:
    """Write an untrained model that spells: one token per letter."""
    marks = ["<pad>", "<end>", "<u>", "<a>"]
    vocabulary = {token: i for i, token in enumerate([*marks, *string.ascii_lowercase, " "])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": marks[2:]})
    tokenizer.chat_template = _TEMPLATE
    build_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def names_of(run: Path, step: int) -> list[str]:
    """All candidates of a step."""
    with open_store(run, read_only=True) as store:
        episodes = list(store.episodes(EpisodeFilters(phase="train", training_step=step)))
        return [c.text for episode in episodes for call in store.calls(episode.id) for c in call.candidates]


def mean_ease(names: Sequence[str]) -> float:
    return sum(map(ease, names)) / len(names)


def run(folder: Path, *, steps: int = 12) -> tuple[list[str], list[str]]:
    """Train in `folder`; the names of the first and of the last step."""
    os.environ.setdefault("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # nobody is asked there: the policy answers
    base = build_base(folder / "base")
    with judging() as url:
        os.environ["JUDGE_URL"] = url
        cotune.train(
            "examples.judged.train:solve",
            make_tasks(8),
            out=folder / "run",
            model=str(base),
            policies="full",
            steps=steps,
            tasks_per_step=8,
            plan={"k": 8},
            learner={"lr": 2e-3},
        )
    return names_of(folder / "run", 0), names_of(folder / "run", steps - 1)


if __name__ == "__main__":
    first, last = run(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/judged"))
    for when, names in {"first step": first, "last step": last}.items():
        print(f"{when}: ease {mean_ease(names):.2f}, such as {', '.join(names[:6])}")
