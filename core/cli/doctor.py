"""`cotune doctor`."""

from __future__ import annotations

import argparse

from cotune.cli.command import Parser, add_fields, add_repeated, fields_of, parse_settings
from cotune.errors import ConfigError
from cotune.storage.run_layout import read_config
from cotune.terminal import progress, tell, terminal

EXAMPLE = "cotune doctor --config train.toml --cluster local"
EXTRA = "train"


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune doctor`. Fields of the configuration become flags, as in `cotune train`."""
    command.add_argument("--config", metavar="FILE", help="TOML file of a run; see docs/reference/configuration.md")
    add_fields(command, "model", "cluster.address")
    add_repeated(command, "--set", "FIELD=VALUE", "set any other field of the configuration, as in cotune train")
    command.add_argument("--run", metavar="RUN", help="take the configuration of this run")
    command.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        metavar="N",
        help="length of the longest prompt, to estimate memory and seconds (default: %(default)s)",
    )
    command.add_argument(
        "--calls",
        type=int,
        default=0,
        metavar="N",
        help="calls of an episode, to estimate seconds (default: one for each role that the configuration names)",
    )
    command.add_argument(
        "--gpu",
        type=float,
        metavar="GB",
        help="forecast for one GPU with this much memory instead of the GPUs of this machine",
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")


def run(a: argparse.Namespace) -> int:
    """Examine this machine, and with a configuration also whether a run with it fits. Print the report.

    The configuration comes from --config, --model or --run; forecasts (--gpu, --cluster) need one. Exit status: 0 if a
    run can start, otherwise 1.
    """
    from cotune.trainer.config.load import load_config

    flags = {**fields_of(a), **parse_settings(a.set)}
    config = load_config(a.config, flags) if a.config or a.model else None
    if a.run is not None:
        config = load_config(None, {**read_config(a.run), **flags})
    if config is None and "cluster.address" in flags:
        raise ConfigError("model", None, "is missing: --cluster needs one", "Pass --model or --config.")
    if a.gpu is not None and config is None:
        raise ConfigError("model", None, "is missing: --gpu needs one", "Pass --model or --config.")
    if a.calls < 0:
        raise ConfigError("--calls", a.calls, "must be 1 or more", "Pass the calls of one episode: --calls 4.")
    with progress() as say:
        say("doctor: looking at this machine")  # before torch is imported, which takes seconds
        from cotune.trainer.before.doctor.doctor import examine, render

        report = examine(config, prompt=a.prompt_tokens, calls=a.calls, gpu=a.gpu, say=say)
    if a.json:
        print(report.to_json())
    else:
        terminal().print(render(report))
        tell("a run can start" if report.fits else "a run cannot start: see what blocks it")
    return 0 if report.fits else 1
