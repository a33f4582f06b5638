"""`cotune export`."""

from __future__ import annotations

import argparse

from cotune.cli.command import Parser, add_moved, add_prompts, add_trust, moved
from cotune.terminal import tell

EXAMPLE = "cotune export runs/r1 --out adapters/"
EXTRA = "train"


def arguments(command: Parser) -> None:
    command.add_argument("run", metavar="RUN", help="run folder")
    command.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write: a new or empty one, or an earlier export"
    )
    add_moved(command, "run")
    command.add_argument(
        "--best", action="store_true", help="the best checkpoint by held-out evaluation (evaluation.keep_best)"
    )
    command.add_argument(
        "--merge", action="store_true", help="add each adapter to its base model: a whole model for each policy"
    )
    command.add_argument(
        "--gguf",
        nargs="?",
        const="f16",
        choices=("f16", "bf16", "f32", "q8_0"),
        help="the same as one GGUF file each, for llama.cpp, Ollama and LM Studio, in this precision (default: f16)",
    )
    command.add_argument(
        "--evaluation",
        metavar="DIR",
        help="folder that cotune eval --out wrote: its figures go into the README (default: the newest one in RUN)",
    )
    add_prompts(command, "what the run was trained with")
    command.add_argument("--push", metavar="USER/NAME", help="then upload the folder to the Hugging Face Hub")
    command.add_argument("--private", action="store_true", help="make that repository private, if it is new")
    add_trust(command)


def run(a: argparse.Namespace) -> int:
    from cotune.trainer.export import export

    form = {"best": a.best, "merge": a.merge, "gguf": a.gguf, "evaluation": a.evaluation, "model": moved(a.model)}
    form |= {"prompts": a.prompts, "any_prompts": a.any_prompts}
    export(a.run, a.out, push=a.push, private=a.private, say=tell, **form)
    if a.gguf:
        tell(f"{a.out}/README.md has the commands for llama.cpp and Ollama")
    return 0
