"""The commands on records: `cotune show`, `cotune runs`, `cotune sft`, and `cotune otel export | import`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from cotune.cli.command import RECORDS, add_command, add_repeated, pairs
from cotune.errors import ConfigError
from cotune.storage.episode_filters import EpisodeFilters
from cotune.terminal import tell, terminal


def add_show(commands: Any) -> None:
    """Add `cotune show`."""

    def run(a: argparse.Namespace) -> int:
        filters = EpisodeFilters(
            task=a.task or "", role=a.role or "", status=a.status or "", low=a.min_reward, high=a.max_reward
        )
        if a.json:
            _show_json(a, filters)
            return 0
        if a.profile:
            from cotune.integrations.profiling.step import print_profile, read_profiles

            for profile in read_profiles(a.run_folder):
                print_profile(terminal(), profile)
            return 0
        if a.steps:
            from cotune.cli.runs import show_steps

            terminal().print(show_steps(a.run_folder, a.limit, explain=a.explain))
            return 0
        if a.explain:
            raise ConfigError(
                "--explain", None, "must be given with --steps", "For example: cotune show RUN --steps --explain"
            )
        from cotune.cli.show import show_run

        found = show_run(a.run_folder, episode=a.episode, groups=a.groups, filters=filters, full=a.full, limit=a.limit)
        terminal().print(found)
        return 0

    text = "show what a run recorded: episodes, the tree of calls of one, curves, groups and what was left out"
    command = add_command(commands, "show", run, text, "cotune show runs/r1 --groups")
    command.add_argument("run_folder", metavar="RUN", help=RECORDS)
    what = command.add_mutually_exclusive_group()
    what.add_argument("--episode", metavar="ID", help="one episode as a tree of calls")
    what.add_argument("--steps", action="store_true", help="curves by role and policy, and a line for each step")
    what.add_argument("--profile", action="store_true", help="where the time of the steps went that were profiled")
    what.add_argument("--groups", action="store_true", help="groups by role and turn, and what was left out and why")
    command.add_argument("--explain", action="store_true", help="with --steps: what each curve and column tells")
    command.add_argument("--full", action="store_true", help="with --episode: whole prompts and answers")
    command.add_argument("--task", metavar="ID", help="episodes of one task only")
    command.add_argument("--role", help="episodes in which this role had a call")
    command.add_argument(
        "--status", choices=("ok", "error", "cancelled", "abandoned"), help="episodes that ended like this"
    )
    command.add_argument("--min-reward", type=float, metavar="X", help="least sum of an episode's rewards")
    command.add_argument("--max-reward", type=float, metavar="X", help="greatest sum of an episode's rewards")
    command.add_argument("--limit", type=int, default=20, help="episodes or steps listed (default: %(default)s)")
    command.add_argument("--json", action="store_true", help="the episodes, the episode or the steps as lines of JSON")


def _show_json(a: argparse.Namespace, filters: EpisodeFilters) -> None:
    from cotune.cli.show_json import episode_as_json, episodes_as_json, line
    from cotune.storage.open_store import open_store
    from cotune.storage.run_layout import read_metrics

    if a.groups or a.profile:
        asked = "--groups" if a.groups else "--profile"
        raise ConfigError(
            "--json", asked, "must be the list of episodes, --episode or --steps", "Leave one of them out."
        )
    if a.steps:
        for metrics in [*read_metrics(a.run_folder)][-a.limit :]:
            print(line(metrics))
        return
    with open_store(a.run_folder, read_only=True) as store:
        for text in [episode_as_json(store, a.episode)] if a.episode else episodes_as_json(store, filters, a.limit):
            print(text)


def add_runs(commands: Any) -> None:
    """Add `cotune runs`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.cli.runs import list_runs

        terminal().print(list_runs(a.folders or ["runs"]))
        return 0

    text = "list the runs of a folder: state, recipe, steps, episodes, and the figure at the first and last step"
    command = add_command(commands, "runs", run, text, "cotune runs runs/")
    command.add_argument("folders", nargs="*", metavar="FOLDER", help="folder of runs, or a run (default: runs)")


def add_sft(commands: Any) -> None:
    """Add `cotune sft`."""

    def run(a: argparse.Namespace) -> int:
        from cotune.reading.sft_export import write_supervised
        from cotune.storage.open_store import open_store

        with open_store(a.run_folder, read_only=True) as store:
            made = write_supervised(store, a.to, role=a.role, min_reward=a.min_reward)
        tell(f"wrote {made.lines} lines to {a.to}")
        _say_left_out(made.left_out)
        return 0 if made.lines else 1

    text = "write recorded answers as chat lines for supervised fine-tuning"
    command = add_command(commands, "sft", run, text, "cotune sft runs/r1 --to sft.jsonl --role writer --min-reward 1")
    command.add_argument("run_folder", metavar="RUN", help=RECORDS)
    command.add_argument("--to", required=True, metavar="FILE", help="JSON-lines file to write")
    command.add_argument("--role", help="calls of this role only")
    command.add_argument(
        "--min-reward", type=float, metavar="X", help="least sum of the answer's rewards, or else of the episode's"
    )


def add_otel(commands: Any) -> None:
    """Add `cotune otel export | import`."""
    text = "export records as OpenTelemetry spans, or read those of other tools as records"
    command = commands.add_parser("otel", help=text, description=f"{text[0].upper()}{text[1:]}.")
    ways = command.add_subparsers(dest="way", required=True, metavar="export | import")
    _export(ways)
    _import(ways)


def _export(ways: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from cotune.integrations.exchange.otel.exporter import export_file, export_to, otlp_exporter
        from cotune.integrations.exchange.otel.spans import Detail
        from cotune.storage.open_store import open_store

        detail = Detail(content=a.content, tokens=a.tokens)
        with open_store(a.run_folder, read_only=True) as store:
            if a.to:
                made = export_file(store, a.to, episode=a.episode, detail=detail)
            else:
                exporter = otlp_exporter(a.endpoint, pairs("--header", a.header))
                made = export_to(store, exporter, episode=a.episode, detail=detail)
                exporter.shutdown()
        tell(f"exported {made.spans} spans of {made.episodes} episodes to {a.to or a.endpoint}")
        _say_left_out(made.left_out)
        return 0

    text = "write OTLP/JSON, or send OTLP over HTTP; no message content and no token ids unless asked for"
    example = "cotune otel export runs/r1 --endpoint http://127.0.0.1:4318"
    command = add_command(ways, "export", run, text, example)
    command.add_argument("run_folder", metavar="RUN", help=RECORDS)
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", metavar="FILE", help="file to write, one line per episode")
    target.add_argument("--endpoint", metavar="URL", help="OTLP/HTTP endpoint; /v1/traces is added to a bare address")
    add_repeated(command, "--header", "NAME=VALUE", "header for the endpoint")
    command.add_argument("--episode", metavar="ID", help="one episode only")
    command.add_argument("--content", action="store_true", help="messages, tools, task inputs and error texts too")
    command.add_argument("--tokens", action="store_true", help="token ids, log-probabilities, policy versions too")


def _import(ways: Any) -> None:
    def run(a: argparse.Namespace) -> int:
        from cotune.integrations.exchange.otel.importer import import_file
        from cotune.storage.open_store import open_store
        from cotune.storage.run_layout import RunLayout

        with open_store(RunLayout(a.to).records) as store:
            for file in a.files:
                made = import_file(file, store)
                tell(f"{file}: {made.episodes} episodes with {made.calls} calls from {made.spans} spans")
                if made.without_tokens:
                    tell(
                        f"{made.without_tokens} of {made.calls} calls have no token ids or log-probabilities: "
                        "to look at, score and fine-tune on, not for a policy gradient"
                    )
                _say_left_out(made.left_out)
            store.flush()
            lost = store.lost
        tell(f"next: cotune show {a.to}" if not lost else f"{lost} records could not be stored")
        return 1 if lost else 0

    text = "read traces in OTLP/JSON, of Phoenix or of Langfuse as records, to look at, score and fine-tune on"
    command = add_command(ways, "import", run, text, "cotune otel import traces.jsonl --to runs/imported")
    command.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="OTLP/JSON, as a collector's file exporter writes it, or JSON of Phoenix or Langfuse",
    )
    command.add_argument("--to", required=True, metavar="RUN", help="run folder; records are added to it")


def _say_left_out(left_out: Mapping[str, int]) -> None:
    if left_out:
        tell("left out: " + ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())))
