"""`cotune otel export | import`."""

from __future__ import annotations

import argparse

from cotune.cli.command import RECORDS, Parser, add_repeated, parse_pairs, parser_texts, tell_left_out
from cotune.tables import plural
from cotune.terminal import tell

EXAMPLE = "cotune otel export runs/r1 --out spans.jsonl"


def arguments(command: Parser) -> None:
    """Add the subcommands `export` and `import` of `cotune otel` with their arguments."""
    forms = command.add_subparsers(dest="subcommand", required=True, metavar="export | import")
    text = "Write OTLP/JSON, or send OTLP over HTTP; message content and token ids only if asked for"
    example = "cotune otel export runs/r1 --endpoint http://127.0.0.1:4318"
    form = forms.add_parser("export", help=text, **parser_texts(text, example))
    form.add_argument("run", metavar="RUN", help=RECORDS)
    target = form.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", metavar="FILE", help="file to write, one line per episode")
    target.add_argument("--endpoint", metavar="URL", help="OTLP/HTTP endpoint; /v1/traces is added to a bare address")
    add_repeated(form, "--header", "NAME=VALUE", "header for the endpoint")
    form.add_argument("--episode", metavar="ID", help="one episode only")
    form.add_argument("--content", action="store_true", help="messages, tools, task inputs and error texts too")
    form.add_argument("--tokens", action="store_true", help="token ids, log-probabilities, policy versions too")

    text = "Read traces in OTLP/JSON as records, to show, score and fine-tune on"
    form = forms.add_parser(
        "import", help=text, **parser_texts(text, "cotune otel import traces.jsonl --out runs/imported")
    )
    text = "OTLP/JSON, as the file exporter of an OpenTelemetry collector writes it, or a page of Phoenix's API"
    form.add_argument("files", nargs="+", metavar="FILE", help=text)
    form.add_argument("--out", required=True, metavar="RUN", help="run folder; records are added to it")


def run(a: argparse.Namespace) -> int:
    return _export(a) if a.subcommand == "export" else _import(a)


def _export(a: argparse.Namespace) -> int:
    """Write recorded episodes as OpenTelemetry traces, to a file or to an endpoint."""
    from cotune.integrations.exchange.otel.exporter import export_file, export_to, otlp_exporter
    from cotune.integrations.exchange.otel.spans import Detail
    from cotune.storage.open_store import open_store

    detail = Detail(content=a.content, tokens=a.tokens)
    with open_store(a.run, read_only=True) as store:
        if a.out:
            exported = export_file(store, a.out, episode=a.episode, detail=detail)
        else:
            exporter = otlp_exporter(a.endpoint, parse_pairs("--header", a.header))
            exported = export_to(store, exporter, episode=a.episode, detail=detail)
            exporter.shutdown()
    spans = plural(exported.spans, "span")
    episodes = plural(exported.episodes, "episode")
    tell(f"exported {spans} of {episodes} to {a.out or a.endpoint}")
    tell_left_out(exported.left_out)
    return 0


def _import(a: argparse.Namespace) -> int:
    """Read files of OpenTelemetry traces as records of a run. Exit status: 1 if a record could not be stored."""
    from cotune.integrations.exchange.otel.importer import import_file
    from cotune.storage.open_store import open_store
    from cotune.storage.run_layout import RunLayout

    with open_store(RunLayout(a.out).records) as store:
        for file in a.files:
            imported = import_file(file, store)
            episodes = plural(imported.episodes, "episode")
            spans = plural(imported.spans, "span")
            tell(f"{file}: {episodes} with {plural(imported.calls, 'call')} from {spans}")
            if imported.without_tokens:
                tell(
                    f"{imported.without_tokens} of {imported.calls} calls have no token ids or log-probabilities: you "
                    "can show, score and "
                    "fine-tune on them, but not use them for a policy gradient"
                )
            tell_left_out(imported.left_out)
        store.flush()
        lost = store.health.lost
    if lost:
        tell(f"{plural(lost, 'record')} could not be stored")
    return 1 if lost else 0
