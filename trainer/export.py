"""`cotune export`: a run's policies as folders, with the trackers and the Hub that they are sent to."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from cotune.adapters.bases import Moved
from cotune.adapters.card import evaluation_command
from cotune.adapters.export import Origin, TrainedPolicy, export_run, whole_models_size, write_export
from cotune.adapters.manifest import Manifest, is_export, not_updated
from cotune.adapters.prompts import prompts_for, prompts_text, trained_with
from cotune.adapters.versions import VERSIONS
from cotune.errors import ConfigError
from cotune.integrations.models.folder.hub import check_repository, push_again
from cotune.integrations.models.folder.hub import push as push_folder
from cotune.integrations.models.folder.to_gguf import Precision
from cotune.near_names import check_arguments
from cotune.records.policies import TRAINED, UNTRAINED
from cotune.storage.checkpoints import newest_checkpoint, read_best, steps_of
from cotune.storage.run_layout import RunLayout, read_run, read_run_json
from cotune.terminal import tell
from cotune.trainer.evaluation.sources import REST, read_sources
from cotune.trainer.evaluation.subject import prompts_together
from cotune.trainer.evaluation.team import open_team
from cotune.trainer.reporting.loggers import send_export

_UNTRAINED = {"frozen": "frozen, the base model answers", "provider": "the application's own provider"}


class ExportForm(TypedDict, total=False):
    """The checkpoint to export, and the form of the export: keyword arguments of `export` and `export_run`."""

    step: int | Literal["best"] | None
    merge: bool
    gguf: Precision | None
    evaluation: str | Path | None
    model: Moved


def export(
    run: str | Path | Mapping[str, str | Path],
    out: str | Path,
    *,
    prompts: str | Path | None = None,
    any_prompts: bool = False,
    push: str | None = None,
    private: bool = False,
    say: Callable[[str], None] = tell,
    **form: Unpack[ExportForm],
) -> Manifest:
    """Write the trained policies of a run to the folder `out`: PEFT folders with roles.json and a model card.

    In place of `run`, a mapping from roles to runs (`RUN` or `RUN#STEP`), exports and models writes the policies of a
    team; its key `*` stands for all other roles. `step` and `evaluation` can only be used with a single run.

    `step` exports the checkpoint after this number of steps instead of the newest one, or with "best" the best one of
    each policy by held-out evaluation, if there is one. With `merge` each policy is a whole model, with `gguf` one GGUF
    file in this precision. The card has the figures of `evaluation`, a folder that `evaluate` wrote (default: the
    newest one in `run`). `model` is the present location of the base model, if it was moved (with several, a mapping
    from old to new locations).

    The export contains the edited prompts of the run's training, or the ones of the file `prompts`. Other prompts than
    in training are refused, unless a search has found them for these weights, or `any_prompts` is true.

    The export is then sent to the run's loggers, and with `push` (USER/NAME) to the Hugging Face Hub. `say` receives
    lines about it. Raises RunError, ConfigError, AdapterError.

    ```python
    manifest = cotune.export("runs/r1", "adapters/")
    print([(entry.role, manifest.policy(entry.role).folder) for entry in manifest.roles])
    ```
    """
    check_arguments(form, ExportForm.__annotations__)
    if push:
        check_repository(push)
    if isinstance(run, Mapping):
        manifest = _export_team(run, out, prompts, any_prompts, say, **form)
    else:
        manifest = _export_run(run, out, prompts, any_prompts, say, **form)
    if push:
        _push(out, push, private, say)
    return manifest


def _export_run(
    run: str | Path,
    out: str | Path,
    prompts: str | Path | None,
    any_prompts: bool,
    say: Callable[[str], None],
    **form: Unpack[ExportForm],
) -> Manifest:
    """Export the policies of a run, and send them to the run's loggers. `say` receives what the user should know of
    them."""
    chosen_prompts = prompts_for(run, prompts, any_prompts=any_prompts)
    gguf = form.get("gguf")
    step = form.get("step")
    if form.get("merge") or gguf:
        _say_size(whole_models_size(run, gguf, form.get("model")), out, say)
    manifest = export_run(run, out, prompts=chosen_prompts, **form)

    trained = sorted(entry.role for entry in manifest.roles if manifest.policy(entry.role).kind in TRAINED)
    with_prompts = f", with {prompts_text(chosen_prompts)}" if chosen_prompts else ""
    say(f"exported {', '.join(trained)} to {out}{with_prompts}")
    _say_version(manifest, out, say)
    _say_checkpoint(RunLayout(run), step, {manifest.policy(role).name for role in trained}, say)
    # The best checkpoints of the policies may be of different steps. The run has evaluated each with the others of its
    # own step.
    steps = {policy.step for policy in manifest.policies if policy.folder}
    if len(steps) > 1 and form.get("evaluation") is None:
        command = evaluation_command(read_run(run).workflow or "", out)
        say(f"this combination was not evaluated: {command}")
    _say_untrained(manifest, say)
    config = read_run_json(run).get("config") or {}
    loggers = config.get("loggers")
    if loggers:
        say(f"sending the export to {', '.join(loggers)} ...")
        send_export(Path(run), Path(out), say)
    return manifest


def _export_team(
    uses: Mapping[str, str | Path],
    out: str | Path,
    prompts: str | Path | None,
    any_prompts: bool,
    say: Callable[[str], None],
    **form: Unpack[ExportForm],
) -> Manifest:
    """Export the policies of a team, each from a run, an export or a model. `uses` has the source of each role."""
    if form.get("step") is not None:
        remedy = "Write ROLE=RUN#STEP for a step."
        raise ConfigError("step", form.get("step"), "cannot be used for a team", remedy)
    if form.get("evaluation") is not None:
        remedy = "Leave it out, and evaluate the exported team."
        raise ConfigError("evaluation", str(form.get("evaluation")), "cannot be used for a team", remedy)

    # Open the policies, and the prompts that go with them.
    sources = read_sources(uses, "use")
    opened = open_team(sources, form.get("model"))
    if opened.note:
        say(opened.note)
    team = opened.policies
    others = None
    if team.other_roles == "frozen":
        others = TrainedPolicy(
            name=UNTRAINED.name, kind="frozen", version=0, roles=(), model=team.model, tool_format=team.tool_format
        )
    distinct = list(dict.fromkeys(sources.values()))
    chosen_prompts = prompts_together(distinct, prompts, any_prompts=any_prompts)
    prompts_of_training = {trained_with(source.place) for source in distinct if source.kind != "model"}
    same_prompts = prompts_of_training.pop() if len(prompts_of_training) == 1 else ""
    manifest = write_export(
        out,
        team.policies,
        origin=Origin(trained_with=same_prompts),
        others=others,
        merge=form.get("merge", False),
        gguf=form.get("gguf"),
        prompts=chosen_prompts,
    )

    for policy in team.policies:
        role = policy.roles[0]
        source = sources.get(role, sources.get(REST))
        assert source is not None, "a policy plays a role that a source was named for"
        say(f"{', '.join(policy.roles)}: {policy.name}@{policy.version} of {source.text}")
    with_prompts = f", with {prompts_text(chosen_prompts)}" if chosen_prompts else ""
    say(f"exported {', '.join(sorted(entry.role for entry in manifest.roles))} to {out}{with_prompts}")
    _say_version(manifest, out, say)
    _say_untrained(manifest, say)
    command = evaluation_command("", out)
    say(f"this combination was not evaluated: {command}")
    return manifest


def _push(out: str | Path, repository: str, private: bool, say: Callable[[str], None]) -> None:
    """Upload an export to the Hugging Face Hub. If the user interrupts it, say how to repeat it."""
    try:
        say(f"pushed to {push_folder(Path(out), repository, private=private, without=VERSIONS)}")
    except KeyboardInterrupt:
        say(f"{out} is whole, but {repository} may lack it: {push_again(Path(out), repository, VERSIONS)}")
        raise


def _say_size(size: int, out: str | Path, say: Callable[[str], None]) -> None:
    """Say how many bytes whole models will take, before they are written."""
    earlier = ", in addition to one earlier version" if is_export(Path(out)) else ""
    say(f"this export will take about {size / 1e9:.2g} GB of disk space{earlier}")


def _say_version(manifest: Manifest, out: str | Path, say: Callable[[str], None]) -> None:
    """Say which version was replaced, and how to go back to it."""
    if manifest.replaced_version:
        command = shlex.join(["cotune", "export", "--roll-back", "--out", str(out)])
        say(f"{manifest.title}; it replaces version {manifest.replaced_version}, to which {command} goes back")


def _say_untrained(manifest: Manifest, say: Callable[[str], None]) -> None:
    """Say which policies no step has updated, and which roles have no folder."""
    for text in not_updated(manifest):
        say(text)
    kinds = {entry.role: manifest.policy(entry.role).kind for entry in manifest.roles}
    for role, kind in sorted(kinds.items()):
        if kind not in TRAINED:
            say(f"no folder for {role}: its policy is {_UNTRAINED[kind]}")


def _say_checkpoint(
    run: RunLayout, step: int | Literal["best"] | None, policies: set[str], say: Callable[[str], None]
) -> None:
    """Say which checkpoint was exported, unless it is the last one of a finished run. `step` is what the user asked
    for, and `policies` are the exported ones."""
    if step == "best":
        best = read_best(run.checkpoints)
        texts = [f"{name} of {best[name].checkpoint} ({best[name].figure:.3f})" for name in sorted(best)]
        say("best: " + ", ".join(texts))
        for name in sorted(policies - best.keys()):
            say(f"{name} has no best checkpoint, as no evaluation judged it: this is its newest one")
        return
    newest = newest_checkpoint(run.checkpoints)
    planned = read_run(run.path).config.steps
    done = 0 if newest is None else steps_of(newest)
    if step is not None and step < done:
        say(f"this is step {step}; the newest checkpoint is step {done}")
    elif planned is not None and done < planned:
        say(f"the run is not finished: this is step {done} of {planned}")
