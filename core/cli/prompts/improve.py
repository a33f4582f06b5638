"""`cotune prompts improve`."""

from __future__ import annotations

import argparse

from cotune.cli.command import (
    APP,
    TASKS,
    Parser,
    add_fields,
    add_repeated,
    add_trust_folder,
    fields_of,
    parse_prices,
    parse_settings,
)
from cotune.errors import ConfigError
from cotune.terminal import tell, terminal

TEXT = "Search for better prompts of an application's roles, and compare them on held-out tasks"
EXAMPLE = (
    "cotune prompts improve app:solve --tasks train.jsonl --eval-tasks held.jsonl --reflection gpt-5-mini --out runs/p1"
)
NOT_SHOWN = 3
"""Exit status if the held-out tasks show no improvement."""


def arguments(command: Parser) -> None:
    """Add the arguments of `cotune prompts improve`. Fields of ImproveOptions become flags; --set reaches
    all others.
    """
    from cotune.cli.prompts.agreement import add_yes
    from cotune.trainer.prompts.options import ImproveOptions

    command.add_argument("workflow", nargs="?", help=APP)
    command.add_argument("--tasks", metavar="FILE", help=TASKS)
    command.add_argument(
        "--out", required=True, metavar="DIR", help="new folder; with --resume the folder of the search"
    )
    command.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted search, or one that reached its limits; the default workflow is the one in --out",
    )
    command.add_argument("--config", metavar="FILE", help="TOML file with a table [prompts]. Flags override it")
    names = ("evaluation.tasks", "reflection", "max_calls", "max_cost", "run", "model")
    held_out = "held-out tasks: the only ones whose figures count (default: a third of the tasks)"
    add_fields(command, *names, table=ImproveOptions, **{"evaluation.tasks": held_out})
    add_yes(command)
    text = "price of a million prompt and completion tokens of a model, or of a policy by its name"
    add_repeated(command, "--price", "MODEL=PROMPT/COMPLETION", text)
    add_repeated(command, "--set", "FIELD=VALUE", "any other field of [prompts], such as rounds=20, or blame=off")
    add_trust_folder(command, "the search")


def run(a: argparse.Namespace) -> int:
    """Search for better texts of prompts, or with --resume continue a search.

    The search pays for calls of models, so it asks before it begins, unless the user set a limit. A folder that is
    resumed may name code, addresses and keys: the user names them again, or trusts the folder (`check_trusted`). Exit
    status: 0 if the new texts are better on held-out tasks.
    """
    tell(f"loading {a.workflow or a.out} ...")
    from cotune.cli.prompts.agreement import may_begin_search
    from cotune.storage.run_code import FOLDER, check_trusted
    from cotune.trainer.prompts.improve import improve
    from cotune.trainer.prompts.options import LIMITS, load_options, named_options, orders_of_search, read_search
    from cotune.trainer.prompts.outcome import render

    # 1. The options that the user names, on the command line and in the file of --config.
    fields = {**fields_of(a), **parse_settings(a.set)}
    if a.price:
        fields["prices"] = parse_prices(a.price)
    set_by_user = set(named_options(a.config, fields))
    has_limit = not LIMITS.isdisjoint(set_by_user)

    # 2. With --resume, the folder names the rest.
    workflow = a.workflow
    tasks = a.tasks
    stored_options = {}
    if a.resume:
        search = read_search(a.out)
        workflow = workflow or search.app
        tasks = tasks or search.tasks
        stored_options = search.options
        # Code, addresses and keys of the folder (its orders) need trust, unless the user names them too.
        orders = orders_of_search(a.out)
        followed_orders = set(orders.current) - set_by_user - {FOLDER}
        if a.workflow:
            followed_orders.discard("workflow")
        # The user began the search of a folder that they trust, and agreed to its limits then.
        is_trusted = check_trusted(orders, followed_orders)
        has_limit = has_limit or is_trusted
    for name, value in (("workflow", workflow), ("tasks", tasks)):
        if not value:
            raise ConfigError(name, None, "is missing", f"For example: {EXAMPLE}")

    # 3. Ask before anything is paid, then search.
    options = load_options(a.config, fields, stored_options)
    app_is_local = bool(options.run or options.model)
    if not may_begin_search(options, yes=a.yes, has_limit=has_limit, app_is_local=app_is_local):
        tell("nothing is asked")
        return 1
    try:
        report = improve(workflow, tasks, options, out=a.out, resume=a.resume)
    except KeyboardInterrupt:
        tell(f"finished runs are stored; to continue: cotune prompts improve --out {a.out} --resume")
        raise
    terminal().print(render(report))
    tell(f"written: {report.path}/prompts.json")
    if report.ended:
        tell(f"to continue: cotune prompts improve --out {a.out} --resume, with a higher limit")
    return 0 if report.verdict == "better" else NOT_SHOWN
