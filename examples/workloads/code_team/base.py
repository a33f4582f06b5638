"""The start of the small training: a model of 0.3M parameters that has learned from solved examples.

    python -m examples.workloads.code_team.base --out runs/code_team --seed 0

Builds a model with random weights that has a token for each piece of a program, records the scripted expert with
`cotune trace`, trains the model on the solved episodes with `cotune train --recipe sft`, and exports it to
OUT/start/team. Each stage prints its command; a stage whose folder exists is not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from examples.stages import run_cotune
from examples.tiny_model import build_model, piece_tokenizer
from examples.tool_agent.provider import serving
from examples.workloads.code_team.app import ACCEPT, ALONE, CODER, NO_PROGRAM, PLANNER, REJECT, RULES
from examples.workloads.code_team.expert import next_message
from examples.workloads.code_team.programs import pieces
from examples.workloads.code_team.tasks import make_tasks
from examples.workloads.plan_path_checked.board import MOVES

HERE = Path(__file__).parent
EXAMPLES = 600
"""Tasks on which the expert is recorded; it solves a part of them."""
TURNS = 2
"""Turns of a task in the small training."""
CALL = ['{"name": "run_python", "arguments": {"program": "', '"}}']
"""The text between the marks of a call, before and after the program."""
TEMPLATE = (
    """
{%- if tools %}<|im_start|>tools
{% for t in tools %}{{ t.function.name }}{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}"""
    '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
    """
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each prompt, piece of a program, move and decision, and for each other character.

    A piece has two tokens: one as it stands in a prompt, and one as JSON, as it stands in a call.
    """
    programs = pieces()
    in_calls = [json.dumps(piece)[1:-1] for piece in programs]
    moves = [f"{before}{move}" for move in MOVES for before in (" ", "")]
    phrases = [CODER, PLANNER, ALONE, *RULES.values(), NO_PROGRAM, ACCEPT, REJECT, "run_python", "error: "]
    phrases += ["Puzzle:\n", "\nProgram:\n", "Output:\n", "\nLast turn: ", "answered, of which ", " did nothing"]
    phrases += ["no answer", "system", "user", "assistant", "tools", "tool"]
    # A longer text is looked for first, so that no piece is taken for the beginning of another one.
    whole = sorted({*programs, *in_calls, *CALL, *moves, *phrases}, key=lambda text: (-len(text), text))
    return piece_tokenizer(whole, TEMPLATE)


def build(out: Path, *, seed: int = 0, examples: int = EXAMPLES, settings: tuple[str, ...] = ()) -> Path:
    """Build the model, record the expert, and train the model on its solved episodes. Returns the model's folder.

    `settings` are further words for the training, such as `--steps 10`.
    """
    out.mkdir(parents=True, exist_ok=True)
    untrained, recorded, learned, start = (out / name for name in ("untrained", "recorded", "sft", "start"))
    if not untrained.is_dir():
        fast = tokenizer()
        build_model(fast, seed).save_pretrained(untrained)
        fast.save_pretrained(untrained)
    if not recorded.is_dir():
        tasks = out / "examples.jsonl"
        lines: list[str] = []
        for number, task in enumerate(make_tasks(examples, seed + 1000, turns=TURNS)):
            # Two in three show the team, the others a plan agent that works alone.
            flow = "alone_planner" if number // 3 % 3 == 2 else "solve"
            lines.append(json.dumps({**task, "flow": flow}) + "\n")
        tasks.write_text("".join(lines))
        with serving(answers=next_message) as url:
            run_cotune(url, "trace", f"{HERE / 'train.py'}:recorded", "--tasks", str(tasks), "--out", str(recorded))
    if not start.is_dir():
        words = ["--config", str(HERE / "sft.toml"), "--model", str(untrained), "--records", str(recorded)]
        words += ["--set", f"seed={seed}", *settings, "--out", str(learned)]
        run_cotune("http://127.0.0.1:9/v1", "train", f"{HERE / 'train.py'}:recorded", *words)
        run_cotune("http://127.0.0.1:9/v1", "export", str(learned), "--out", str(start))
    return start / "team"


def main() -> None:
    """Build the model that the small training starts from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/code_team"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="recorded tasks (default: %(default)s)")
    options = parser.parse_args()
    print(f"model saved in {build(options.out, seed=options.seed, examples=options.examples)}")


if __name__ == "__main__":
    main()
