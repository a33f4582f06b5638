"""`cotune export`."""

from __future__ import annotations

import argparse

from cotune.cli.command import Parser, add_moved, add_prompts, add_use, parse_moved_models
from cotune.errors import ConfigError
from cotune.terminal import tell

EXAMPLE = "cotune export runs/r1 --out adapters/"
EXTRA = "train"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune export`."""
    command.add_argument("run", nargs="?", metavar="RUN", help="run folder")
    command.add_argument(
        "--out", required=True, metavar="DIR", help="folder to write: a new or empty one, or an earlier export"
    )
    command.add_argument(
        "--roll-back",
        nargs="?",
        type=int,
        const=0,
        metavar="VERSION",
        help="instead of exporting, restore an earlier version of --out (default: the version before the present one)",
    )
    add_use(command, "RUN")
    add_moved(command, "run")
    command.add_argument(
        "--step",
        type=_step,
        metavar="N|best",
        help="the checkpoint after N steps, or the best one by held-out evaluation, which evaluation.keep_best keeps "
        "(default: the newest)",
    )
    command.add_argument(
        "--merge", action="store_true", help="add each adapter to its base model: a whole model for each policy"
    )
    command.add_argument(
        "--gguf",
        nargs="?",
        const="f16",
        choices=("f16", "bf16", "f32", "q8_0"),
        help="like --merge, but one GGUF file for each policy, for llama.cpp, Ollama and LM Studio, in this precision "
        "(default: f16)",
    )
    command.add_argument(
        "--evaluation",
        metavar="DIR",
        help="folder that cotune eval --out wrote: its figures go into the README (default: the newest one in RUN)",
    )
    add_prompts(command, "what the run was trained with")
    command.add_argument("--push", metavar="USER/NAME", help="then upload the folder to the Hugging Face Hub")
    command.add_argument("--private", action="store_true", help="make the repository of --push private, if it is new")


def _step(text: str) -> int | str:
    if text == "best" or text.isdecimal():
        return text if text == "best" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps nor best")


def run(a: argparse.Namespace) -> int:
    """Write the trained adapters of a run, or of a team from several sources, into a folder. With --roll-back, restore
    an earlier version of that folder instead.
    """
    if a.roll_back is not None:
        return _roll_back(a)
    if a.run is None and not a.use:
        remedy = "Name a run folder, or a team (--use ROLE=SOURCE), or restore an earlier export: --roll-back."
        raise ConfigError("run", None, "is missing", remedy)
    if a.run is not None and a.use:
        raise ConfigError("run", a.run, "cannot be combined with --use", f"Write --use {a.run} for its other roles.")

    from cotune.trainer.evaluation.sources import split_assignments
    from cotune.trainer.export import export

    export(
        split_assignments(a.use, "--use") if a.use else a.run,
        a.out,
        step=a.step,
        merge=a.merge,
        gguf=a.gguf,
        evaluation=a.evaluation,
        model=parse_moved_models(a.model),
        prompts=a.prompts,
        any_prompts=a.any_prompts,
        push=a.push,
        private=a.private,
        say=tell,
    )
    if a.gguf:
        tell(f"{a.out}/README.md has the commands for llama.cpp and Ollama")
    return 0


def _roll_back(a: argparse.Namespace) -> int:
    """Restore an earlier version of an export. Flags about what to export have no effect then, so they are errors."""
    from cotune.adapters.versions import roll_back

    flags_of_exports = (
        "run",
        "use",
        "step",
        "merge",
        "gguf",
        "evaluation",
        "model",
        "prompts",
        "any_prompts",
        "push",
        "private",
    )
    for name in flags_of_exports:
        if getattr(a, name):
            raise ConfigError(name, getattr(a, name), "has no effect with --roll-back", "Leave it out.")
    manifest = roll_back(a.out, a.roll_back or None)
    tell(f"{a.out} is {manifest.title} again; a server that runs keeps its version until you start it again")
    return 0
