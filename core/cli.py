"""The command line: `cotune COMMAND`, one function per command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tomllib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cotune.cli_otel import add_otel, add_sft
from cotune.errors import ConfigError, CotuneError

_DESCRIPTION = """Train the agents you already have.

  cotune check  app:solve --tasks tasks.jsonl                      a dry run without a model: what would be trained
  cotune trace  app:solve --tasks tasks.jsonl                      record with the model the app uses today
  cotune train  app:solve --tasks tasks.jsonl --model Qwen/Qwen3-1.7B
  cotune eval   app:solve --tasks held_out.jsonl --run runs/r1     against the base, with intervals
  cotune export runs/r1 --to adapters/                             one PEFT folder per role
  cotune serve  adapters/                                          OpenAI-compatible, one model name per role
  cotune gateway --upstream https://api.openai.com/v1              record applications in other processes and languages
  cotune show   runs/r1                                            episodes, calls, groups, what was left out

`app:solve` is the attribute `solve` of the module (or file) `app`: a function decorated with @cotune.workflow.
"""

_APP = "MODULE:ATTRIBUTE or FILE.py:ATTRIBUTE of a @cotune.workflow"
_TASKS = "JSON-lines file: one task per line"
_FUNCTION = "MODULE:FUNCTION"
_REDACT = "sees each message before it is stored, and returns what to store; see docs/privacy.md"


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sub-parser's `run` default is the function that does it."""
    top = argparse.ArgumentParser("cotune", description=_DESCRIPTION, formatter_class=_Formatter)
    top.add_argument("-v", "--verbose", action="store_true", help="log what happens, and show tracebacks")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_check, _trace, _train, _eval, _export, _serve, _gateway, _show):
        add(commands)
    add_otel(commands, _add)
    add_sft(commands, _add)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="%(name)s: %(message)s")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|peft")
    sys.path.insert(0, str(Path.cwd()))
    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except CotuneError as error:
        if arguments.verbose:
            logging.getLogger("cotune").exception("failed")
        print(f"cotune {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if arguments.verbose:
            logging.getLogger("cotune").exception("failed")
        print(f"cotune {arguments.command}: {error}", file=sys.stderr)
        return 1


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


def _add(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str) -> Any:
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.\n\nExample:\n  {example}",
        formatter_class=_Formatter,
    )
    command.set_defaults(run=run)
    return command


def _check(commands: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from rich.console import Console

        from cotune.trainer.check import check
        from cotune.trainer.check_report import render
        from cotune.trainer.config import load_config

        flags = {k: v for k, v in vars(a).items() if "." in k or k in ("policies", "recipe")}
        config = load_config(a.config, {**flags, "model": a.model or "none", **_settings(a.set)})
        bounds = {"limit": a.limit, "calls": a.calls, "timeout": a.timeout}
        report = check(
            a.workflow, a.tasks, config, model=a.model, answers=a.answer, call_tools=not a.no_tools, **bounds
        )
        if a.json:
            print(report.to_json())
        else:
            Console().print(render(report))
        return 0 if report.trainable else 1

    text = "run an application on a task with made-up answers and say what would be trained, and what not and why"
    command = _add(commands, "check", run, text, "cotune check app:solve --tasks tasks.jsonl")
    command.add_argument("workflow", help=_APP)
    command.add_argument("--tasks", required=True, help=_TASKS)
    command.add_argument("--limit", type=int, default=1, help="take the first N tasks (default: %(default)s)")
    command.add_argument("--config", help="TOML file of the training run; see docs/config.md")
    command.add_argument("--model", help="count tokens with this model's tokenizer; it is not loaded")
    command.add_argument("--policies", choices=("shared", "lora", "full"), help="default: lora")
    command.add_argument("--plan", dest="plan.kind", choices=("tree", "independent"), help="as in cotune train")
    command.add_argument("-k", dest="plan.k", type=int, metavar="K", help="candidates per call, or episodes per task")
    command.add_argument("--recipe", help="as in cotune train")
    command.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as in cotune train")
    command.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="TEXT",
        help="a text that the made-up answers use; repeatable, used in turn",
    )
    command.add_argument("--no-tools", action="store_true", help="never answer with a tool call: no tool is run")
    command.add_argument("--calls", type=int, default=64, help="most calls of an episode (default: %(default)s)")
    command.add_argument("--timeout", type=float, default=60.0, help="seconds for one episode (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def _trace(commands: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from cotune.trainer.trace import trace

        settings = {"concurrency": a.concurrency, "limit": a.limit, "timeout": a.timeout, "redact": a.redact}
        return trace(a.workflow, a.tasks, a.out, otlp=a.otlp, otlp_content=a.otlp_content, **settings)

    text = "record episodes of an application with the model that it uses today"
    command = _add(commands, "trace", run, text, "cotune trace app:solve --tasks tasks.jsonl --out runs/traced")
    command.add_argument("workflow", help=_APP)
    command.add_argument("--tasks", required=True, help=_TASKS)
    command.add_argument(
        "--out", default="runs/trace", help="run folder; records are added to it (default: %(default)s)"
    )
    command.add_argument("--concurrency", type=int, default=8, help="episodes in flight (default: %(default)s)")
    command.add_argument("--limit", type=int, help="take only the first N tasks")
    command.add_argument("--timeout", type=float, default=600.0, help="seconds for one episode (default: %(default)s)")
    command.add_argument("--redact", metavar=_FUNCTION, help=_REDACT)
    command.add_argument("--otlp", metavar="URL", help="also send each episode's spans to this OTLP/HTTP endpoint")
    command.add_argument("--otlp-content", action="store_true", help="with --otlp, send messages and task inputs too")


def _train(commands: Any) -> None:
    text = "train the policies of an application's roles"
    command = _add(commands, "train", _run_train, text, "cotune train app:solve --tasks tasks.jsonl --model base/")
    command.add_argument("workflow", nargs="?", help=_APP)
    command.add_argument("--tasks", help=_TASKS)
    command.add_argument("--config", help="TOML file; see docs/config.md. Flags go before it")
    command.add_argument("--model", help="folder or Hugging Face id of the base model")
    command.add_argument(
        "--policies",
        choices=("shared", "lora", "full"),
        help="one adapter for all roles, one per role, or one model per role (default: lora)",
    )
    command.add_argument(
        "--plan", dest="plan.kind", choices=("tree", "independent"), help="default: tree when the workflow has scorers"
    )
    command.add_argument(
        "-k", dest="plan.k", type=int, metavar="K", help="candidates per call, or episodes per task (default: 4)"
    )
    command.add_argument(
        "--select",
        dest="plan.select",
        choices=("argmax", "sample", "first"),
        help="candidate that goes on (default: argmax)",
    )
    command.add_argument(
        "--recipe", help="at_grpo, dr_mas, grpo, dr_grpo, rloo, gspo, dapo, cispo; see docs/recipes.md"
    )
    command.add_argument("--steps", type=int, help="default: 100")
    command.add_argument("--tasks-per-step", dest="tasks_per_step", type=int, help="default: 32")
    command.add_argument("--concurrency", type=int, help="episodes in flight (default: 64)")
    command.add_argument(
        "--lr", dest="learner.lr", type=float, help="learning rate (default: 5e-6 for LoRA, 1e-6 for all weights)"
    )
    command.add_argument(
        "--max-tokens", dest="sampling.max_tokens", type=int, help="new tokens per candidate (default: 256)"
    )
    command.add_argument("--seed", type=int, help="default: 0")
    command.add_argument(
        "--on-failure",
        dest="on_failure",
        metavar="HOW",
        help="what failed episodes teach: exclude (nothing) or reward:NUMBER (default: exclude)",
    )
    command.add_argument("--redact", metavar=_FUNCTION, help=_REDACT)
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field, such as lora.rank=8 or schedule.kind=linear",
    )
    command.add_argument("--out", help="run folder (default: runs/DATE-TIME)")
    command.add_argument(
        "--resume", metavar="RUN", help="go on with a stopped or killed run, under its own configuration"
    )


def _run_train(a: argparse.Namespace) -> int:
    from cotune.trainer.config import load_config
    from cotune.trainer.train import resume, train

    if a.resume:
        summary = resume(a.resume, workflow=a.workflow, tasks=a.tasks)
    else:
        for name in ("workflow", "tasks"):
            if getattr(a, name) is None:
                raise ConfigError(name, None, "given, unless --resume is", "See cotune train --help.")
        flags = {k: v for k, v in vars(a).items() if "." in k or k in _FLAGS}
        summary = train(a.workflow, a.tasks, load_config(a.config, {**flags, **_settings(a.set)}), run=a.out)
    state = "finished" if summary.finished else "stopped"
    print(f"{state} after {summary.steps} steps in {summary.seconds:.0f} s: {summary.path}")
    if summary.finished:
        print(f"next: cotune export {summary.path} --to adapters/")
    return 0 if summary.finished else 130


_FLAGS = ("model", "policies", "recipe", "steps", "tasks_per_step", "concurrency", "seed", "on_failure", "redact")


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    """FIELD=VALUE pairs; values are read as TOML, and as text where they are not TOML."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError("--set", pair, "FIELD=VALUE", "For example: --set lora.rank=8")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found


def _eval(commands: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from rich.console import Console

        from cotune.trainer.evaluate import evaluate
        from cotune.trainer.evaluation_report import render

        modes, settings = tuple(a.modes.split(",")), {"limit": a.limit, "concurrency": a.concurrency, "out": a.out}
        Console().print(render(evaluate(a.run_folder, a.workflow, a.tasks, modes=modes, **settings)))
        return 0

    text = "evaluate trained policies against the base, with confidence intervals"
    command = _add(commands, "eval", run, text, "cotune eval app:solve --tasks held_out.jsonl --run runs/r1")
    command.add_argument("workflow", help=_APP)
    command.add_argument("--tasks", required=True, help=_TASKS)
    command.add_argument("--run", dest="run_folder", required=True, help="run folder or export")
    command.add_argument(
        "--modes",
        default="base,trained,base_greedy,greedy,swapped",
        help="any of base, trained (temperature 1), base_greedy, greedy, swapped (policies of the roles exchanged)",
    )
    command.add_argument("--limit", type=int, help="take only the first N tasks")
    command.add_argument("--concurrency", type=int, default=64, help="episodes in flight (default: %(default)s)")
    command.add_argument("--out", metavar="DIR", help="also write the records and evaluation.json there")


def _export(commands: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from cotune.adapters.export import export_run

        manifest = export_run(a.run_folder, a.to)
        print(f"exported {', '.join(sorted(entry.role for entry in manifest.roles))} to {a.to}")
        print(f"next: cotune serve {a.to}")
        return 0

    text = "write the trained policies as PEFT folders (or models) with roles.json and a model card"
    command = _add(commands, "export", run, text, "cotune export runs/r1 --to adapters/")
    command.add_argument("run_folder", metavar="RUN", help="run folder")
    command.add_argument("--to", required=True, metavar="DIR", help="folder to write; must be empty, new, or an export")


def _serve(commands: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from cotune.adapters.serve import serve

        token = a.token or os.environ.get("COTUNE_TOKEN")
        serve(a.folder, partial(print, flush=True), host=a.host, port=a.port, token=token, base=a.model, names=a.role)
        return 0

    text = "serve an export (or a plain model) over an OpenAI-compatible API, one model name per role"
    command = _add(commands, "serve", run, text, "cotune serve adapters/ --port 8000")
    command.add_argument("folder", metavar="DIR", help="export, or model folder or Hugging Face id")
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s); any other than loopback needs a token",
    )
    command.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    command.add_argument("--token", help="bearer token that clients must send (or the environment's COTUNE_TOKEN)")
    command.add_argument("--model", metavar="BASE", help="base model, where it lies elsewhere than the export says")
    command.add_argument(
        "--role", action="append", default=[], metavar="NAME", help="further model name for a plain model; repeatable"
    )


def _gateway(commands: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from cotune.integrations.gateway import serve
        from cotune.integrations.gateway_proxy import Limits
        from cotune.redaction import load_redactor

        serve(
            a.upstream,
            a.records,
            partial(print, flush=True),
            host=a.host,
            port=a.port,
            token=a.token or os.environ.get("COTUNE_TOKEN"),
            key=os.environ.get("COTUNE_UPSTREAM_KEY"),
            limits=Limits(body=a.max_body, in_flight=a.max_inflight, seconds=a.timeout),
            redactors=[load_redactor(a.redact)] if a.redact else [],
        )
        return 0

    text = "record applications in other processes and languages, between them and their provider"
    command = _add(commands, "gateway", run, text, "cotune gateway --upstream https://api.openai.com/v1")
    command.add_argument("--upstream", required=True, metavar="URL", help="base URL of the provider's OpenAI API")
    command.add_argument(
        "--records", default="runs/gateway", metavar="PATH", help="folder or records file (default: %(default)s)"
    )
    command.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s); any other than loopback needs a token",
    )
    command.add_argument("--port", type=int, default=8100, help="0 takes a free one (default: %(default)s)")
    command.add_argument("--token", help="token that clients must send (or the environment's COTUNE_TOKEN)")
    command.add_argument(
        "--max-body", type=int, default=16 << 20, metavar="BYTES", help="largest body (default: %(default)s)"
    )
    command.add_argument(
        "--max-inflight", type=int, default=512, metavar="N", help="requests in flight (default: %(default)s)"
    )
    command.add_argument("--timeout", type=float, default=600.0, help="seconds for one request (default: %(default)s)")
    command.add_argument("--redact", metavar=_FUNCTION, help=_REDACT)


def _show(commands: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from rich.console import Console

        from cotune.show import show_run

        Console().print(show_run(a.run_folder, episode=a.episode, task=a.task, groups=a.groups, limit=a.limit))
        return 0

    text = "show what a run recorded: episodes, the tree of calls of one, groups and what was left out"
    command = _add(commands, "show", run, text, "cotune show runs/r1 --groups")
    command.add_argument("run_folder", metavar="RUN", help="run folder or records file")
    command.add_argument("--episode", metavar="ID", help="one episode as a tree of calls")
    command.add_argument("--task", metavar="ID", help="episodes of one task only")
    command.add_argument("--groups", action="store_true", help="groups by role and turn, and what was left out and why")
    command.add_argument("--limit", type=int, default=20, help="episodes listed (default: %(default)s)")


if __name__ == "__main__":
    sys.exit(main())
