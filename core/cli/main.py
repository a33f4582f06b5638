"""The command line: `cotune COMMAND`. The commands are in `train`, `serve`, `records` and `rewards` beside it."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import NoReturn

from cotune.cli.command import Formatter
from cotune.cli.records import add_otel, add_runs, add_sft, add_show
from cotune.cli.replay import add_replay
from cotune.cli.rewards import add_judge, add_score
from cotune.cli.serve import add_export, add_gateway, add_serve
from cotune.cli.train import add_check, add_doctor, add_eval, add_trace, add_train
from cotune.cli.view import add_report, add_view
from cotune.errors import CotuneError
from cotune.recording.context import current_episode
from cotune.runtime.interrupts import ends_as_interrupts, interrupt_ends, interrupt_raises
from cotune.runtime.process_exit import INTERRUPTED, leave, own_process
from cotune.runtime.user_code import origin
from cotune.storage.whole_file import of_system
from cotune.terminal import LogFormat, harmless

_DESCRIPTION = """Train the agents you already have.

  cotune check  app:solve --tasks tasks.jsonl                      a dry run without a model: what would be trained
  cotune doctor --config train.toml                                whether this machine or cluster can run it
  cotune trace  app:solve --tasks tasks.jsonl                      record with the model the app uses today
  cotune train  app:solve --tasks tasks.jsonl --model Qwen/Qwen3-1.7B
  cotune eval   app:solve --tasks held_out.jsonl --run runs/r1     against the base, with intervals
  cotune export runs/r1 --to adapters/                             one PEFT folder per role
  cotune serve  adapters/                                          OpenAI-compatible, one model name per role
  cotune gateway --upstream https://api.openai.com/v1              record applications in other processes and languages
  cotune replay runs/r1 --episode ID --call 2                      one episode again, from a call on
  cotune show   runs/r1                                            episodes, calls, groups, what was left out
  cotune runs                                                      the runs in runs/: state, steps, success
  cotune view   runs/r1 runs/r2                                    the same in the browser, with curves
  cotune report runs/r1 --out report.html                          one file to send to somebody
  cotune judge  runs/r1 --labels labels.jsonl                      how far a judge agrees with people
  cotune score  runs/traced app:solve                              rewards of what was recorded, by the scorers of today

`app:solve` is the attribute `solve` of the module (or file) `app`: a function decorated with @cotune.workflow.
"""

_APPLICATIONS = (add_check, add_doctor, add_trace, add_train, add_eval, add_replay)
_SERVICES = (add_export, add_serve, add_gateway)
_RECORDS = (add_runs, add_show, add_view, add_report, add_judge, add_score, add_otel, add_sft)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sub-parser's `run` default is the function that does it."""
    top = argparse.ArgumentParser("cotune", description=_DESCRIPTION, formatter_class=Formatter)
    top.add_argument("-v", "--verbose", action="store_true", help="log what happens, and show tracebacks")
    top.add_argument("--version", action="version", version=f"cotune {version('cotune')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (*_APPLICATIONS, *_SERVICES, *_RECORDS):
        add(commands)
    return top


def of_use(record: logging.LogRecord) -> bool:
    """Whether a log line tells something: not what an application says on its way out of an episode that was stopped,
    whose calls all fail then, each with its retries. Whoever stopped it says so; `-v` shows all."""
    episode = current_episode.get()
    return episode is None or not episode.interrupted or record.name.partition(".")[0] == "cotune"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    commands = parser()
    if "_ARGCOMPLETE" in os.environ:
        from cotune.integrations.exchange.argcomplete.completion import complete

        complete(commands)
    arguments = commands.parse_args(argv)
    shown = logging.StreamHandler()
    shown.setFormatter(LogFormat())
    if not arguments.verbose:
        shown.addFilter(of_use)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, handlers=[shown])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    if getattr(arguments, "trust_remote_code", False):
        os.environ["COTUNE_TRUST_REMOTE_CODE"] = "1"
    try:
        interrupt_raises()
        run: Callable[[argparse.Namespace], int] = arguments.run
        with ends_as_interrupts():
            return run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:
        return _failed(arguments, f"the application called sys.exit({error.code!r}){origin(error)}.")
    except CotuneError as error:
        return _failed(arguments, str(error))
    except OSError as error:
        return _failed(arguments, of_system(error))
    except ModuleNotFoundError as error:
        if arguments.extra is None:
            raise
        what = f"What this command needs comes with: pip install 'cotune[{arguments.extra}]'."
        return _failed(arguments, f"{error.msg}. {what}")


def _failed(arguments: argparse.Namespace, message: str) -> int:
    if arguments.verbose:
        logging.getLogger("cotune").exception("failed")
    print(f"cotune {arguments.command}: {harmless(message)}", file=sys.stderr)
    return 1


def run() -> NoReturn:
    """The process of the command line: run the command, and end whatever the application has left running."""
    interrupt_ends()
    own_process()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may lack what a model says
            stream.reconfigure(errors="replace" if stream is sys.stdout else "backslashreplace")
    status = main()
    interrupt_ends()
    leave(status)


if __name__ == "__main__":
    run()
