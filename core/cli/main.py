"""The command line: `cotune COMMAND`. Each command is a module of its name in this folder."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from cotune.cli.command import Formatter, Parser, parser_texts, width, wrap_paragraph
from cotune.cli.removed import REMOVED_COMMANDS, removed_flag
from cotune.errors import CotuneError, UntrustedFolderError, install_extra
from cotune.near_names import did_you_mean, near_names
from cotune.recording.context import current_episode
from cotune.runtime.interrupts import ends_as_interrupts, interrupt_ends, interrupt_raises
from cotune.runtime.process_exit import INTERRUPTED, leave, own_process
from cotune.runtime.user_code import error_origin
from cotune.storage.whole_file import system_error_message
from cotune.terminal import LogFormat, ask_yes_no, harmless, suggest, tell

COMMANDS = {
    "Start": {
        "doctor": "Report what this machine can run, and whether a run fits",
        "check": "Run your application on drawn answers; report what would be trained",
        "trace": "Record your application with the model it uses today",
    },
    "Train": {
        "train": "Train the policies of an application's roles",
        "eval": "Compare trained policies with the base and with today's model",
        "prompts": "Better prompts without training: show, edit, improve, diff, export",
    },
    "Look": {
        "show": "Show runs, episodes, calls and curves; --html FILE writes one page",
        "view": "Show runs in the browser: curves, episodes, groups, tasks",
        "blame": "Find which role loses the episodes, by swapping its answers",
        "replay": "Run a recorded episode again, from a call on or as a test",
    },
    "Use": {
        "export": "Write the trained policies as PEFT folders, whole models or GGUF",
        "serve": "Serve an export, or a plain model, over an OpenAI-compatible API",
    },
    "Collect": {
        "gateway": "Record applications in any language, as a proxy of their provider",
        "collect": "Collect the records of many processes in one store",
        "records": "Records: list, score, judge, sft, prune, delete, copy, upgrade",
        "otel": "Exchange records with tracing tools: export, import",
    },
}
"""The commands by group, each with a line of help. The module of a command has `EXAMPLE`, `arguments` and `run`, and
`EXTRA` if it needs packages beyond the base install. `EXTRA_FOR` names a flag if only this flag needs them."""
_SERVERS = ("collect", "gateway", "serve", "view")

_START = """Train the agents you already have.

With a function `solve` in app.py, decorated with @cotune.workflow:
  cotune check app:solve --tasks tasks.jsonl
  cotune train app:solve --tasks tasks.jsonl --model Qwen/Qwen3-1.7B
  cotune eval app:solve --tasks held_out.jsonl --run runs/r1

"""


def parser(line: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The parser of all commands. With a command `line`, only the modules of commands that it names are loaded."""
    listed_commands: list[str] = []
    for group, commands in COMMANDS.items():
        listed_commands.append(f"{group}:")
        for name, text in commands.items():
            listed_commands.append(wrap_paragraph(text, width(), first=f"  {name:<9}", rest=" " * 11))
    top = argparse.ArgumentParser(
        "cotune",
        allow_abbrev=False,
        usage="cotune [-h] [-v] [--version] COMMAND ...",
        description=_START + "\n".join(listed_commands),
        epilog="cotune COMMAND --help shows the flags of a command.",
        formatter_class=Formatter,
    )
    top.add_argument("-v", "--verbose", action="store_true", help="log what happens, and show tracebacks")
    top.add_argument("--version", action="version", version=f"cotune {version('cotune')}")
    subcommands = top.add_subparsers(
        prog="cotune", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, parser_class=Parser
    )
    for commands in COMMANDS.values():
        for name, text in commands.items():
            if line is not None and name not in line:  # this command will not run: its name is enough
                subcommands.add_parser(name)
                continue
            folder = "cotune.cli.servers" if name in _SERVERS else "cotune.cli"
            module = import_module(f"{folder}.{name}")
            command = subcommands.add_parser(name, **parser_texts(text, module.EXAMPLE))
            extra = getattr(module, "EXTRA", None)
            extra_for = getattr(module, "EXTRA_FOR", None)
            command.set_defaults(run_command=module.run, extra=extra, extra_for=extra_for)
            module.arguments(command)
    return top


def reject_unknown_words(line: Sequence[str]) -> None:
    """Exit with status 2 if the command of `line` does not exist, or if it or one of its flags was removed. The message
    names similar commands or the replacement."""
    # No flag before the command takes a value, so the first word that is not a flag is the command.
    name = next((word for word in line if not word.startswith("-")), None)
    if name is None:
        return
    commands: list[str] = []
    for group in COMMANDS.values():
        commands.extend(group)
    if name in REMOVED_COMMANDS:
        parser([]).error(f"{name} was removed. {REMOVED_COMMANDS[name]}")
    if name not in commands:
        remedy = did_you_mean(near_names(name, commands)) or "cotune --help lists the commands."
        parser([]).error(f"{name!r} is not a command. {remedy}")
    if fault := removed_flag(line[line.index(name) :]):
        parser([]).error(fault)


def is_worth_showing(record: logging.LogRecord) -> bool:
    """Whether a log line is shown without `-v`. Hidden are the lines of an application whose episode was stopped: all
    its calls fail then, each with its retries."""
    episode = current_episode.get()
    return episode is None or not episode.interrupted or record.name.partition(".")[0] == "cotune"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, or print the help if there is none.

    Returns the exit status: 0 done, 1 an error, 2 wrong usage, 130 interrupted.
    """
    if "_ARGCOMPLETE" in os.environ:
        from cotune.integrations.exchange.argcomplete.completion import complete

        complete(parser(os.environ.get("COMP_LINE", "").split()))
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        parser(argv).print_help()
        return 0
    reject_unknown_words(argv)
    arguments = parser(argv).parse_args(argv)
    _set_up_logging(arguments.verbose)
    try:
        interrupt_raises()
        with ends_as_interrupts():
            status = _run_trusted(arguments)
            if sys.stdout.isatty():
                from cotune.cli.printing.next_command import next_commands

                suggest(*next_commands(arguments, status))
            return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended: the last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:
        return _print_failure(arguments, f"the application called sys.exit({error.code!r}){error_origin(error)}.")
    except CotuneError as error:
        return _print_failure(arguments, str(error))
    except OSError as error:
        return _print_failure(arguments, system_error_message(error))
    except ModuleNotFoundError as error:
        if arguments.extra is None:
            raise
        return _print_failure(arguments, f"{error.msg}. {install_extra(arguments.extra)}")


def _set_up_logging(verbose: bool) -> None:
    """Log to standard error: warnings, and with `verbose` everything. Noise of libraries is turned off."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormat())
    if not verbose:
        handler.addFilter(is_worth_showing)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else tokenizers warn in every forked process
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")


def _run_trusted(arguments: argparse.Namespace) -> int:
    """Run the command. If it would use code or addresses from a folder that this user did not write, continue only if
    the user trusts the folder: with --trust-folder, or by an answer at the terminal."""
    # Each answer at the terminal trusts one folder, and the command is run again: it may use a second folder.
    while True:
        try:
            status: int = arguments.run_command(arguments)
            return status
        except UntrustedFolderError as error:
            if not arguments.trust_folder:
                if not sys.stdin.isatty():
                    raise
                tell(f"{error.folder} was not written by you on this machine. It chooses code or addresses:")
                for name, value in error.used_orders.items():
                    tell(f"  {name}: {value}")
                if not ask_yes_no("Trust it? [y/N] ", default=False):
                    tell("nothing is run")
                    return 1
            from cotune.storage.run_code import remember_orders

            remember_orders(error.orders)


def _print_failure(arguments: argparse.Namespace, message: str) -> int:
    if arguments.verbose:
        logging.getLogger("cotune").exception("failed")
    print(f"cotune {arguments.command}: {harmless(message)}", file=sys.stderr)
    return 1


def run() -> NoReturn:
    """Run the command line as a process of its own: run the command, then end the process with the command's status.

    Threads that the application has left running do not keep the process alive.
    """
    # Until the command begins, and again after it, Ctrl-C ends the process at once: no work would be lost.
    interrupt_ends()
    own_process()
    # An answer may have characters that the encoding of the terminal lacks. They must not fail the command.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    status = main()
    interrupt_ends()
    leave(status)


if __name__ == "__main__":
    run()
