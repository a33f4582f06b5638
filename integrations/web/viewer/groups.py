"""The page of a step's groups by role and turn, with the left-out candidates, and the page of a single group."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cotune.algorithms.filters import REASONS
from cotune.algorithms.run_recipe import all_taught
from cotune.integrations.web.viewer.episode import ended_episode, of_candidates, show_calls
from cotune.integrations.web.viewer.viewer import Viewer, hues, start, whole
from cotune.reading.groups import MOST_EPISODES, by_role_and_turn

MOST_GROUPS = 60
"""Most groups on a page."""
MOST_SIBLINGS = 48
"""Most candidates on the page of a group."""


def groups_page(viewer: Viewer, request: Request) -> Response:
    """The groups of a step by role and turn, and the candidates left out."""
    run = viewer.run(request)
    query = request.query_params
    steps = [step + 1 for step in run.figures.steps("train") if step >= 0]
    step = whole(query.get("step"))
    if step not in steps:
        step = steps[-1] if steps else None
    recorded_step = None if step is None else step - 1  # records count from 0, pages from 1
    groups = viewer.groups(run, recorded_step)

    # The metrics of a finished step have its numbers. Without them, the groups are counted.
    left_out: Mapping[str, int] = groups.left_out
    candidates = groups.candidates
    for metrics in run.metrics:
        if metrics["step"] == recorded_step:
            left_out = metrics["left_out"]
            candidates = metrics["rows"] + sum(left_out.values())
            break
    role = query.get("role", "")
    kind = query.get("kind", "")
    selected_groups = []
    for group in groups.groups:
        has_role = role in ("", group.role)
        kind_of_group = "left_out" if group.reason else "trained"
        if has_role and kind in ("", kind_of_group):
            selected_groups.append(group)
    first = start(request)
    return viewer.page(
        request,
        "groups.html",
        run,
        steps=steps,
        step=step,
        taught=all_taught(run.config),
        found=groups,
        left_out=left_out,
        candidates=candidates,
        reasons=REASONS,
        cells=by_role_and_turn(groups.groups),
        groups=selected_groups[first : first + MOST_GROUPS],
        total=len(selected_groups),
        start=first,
        size=MOST_GROUPS,
        most=MOST_EPISODES,
        role=role,
        kind=kind,
        hues=hues(run, *(group.role for group in groups.groups)),
        roles=sorted({group.role for group in groups.groups}),
    )


def group_page(viewer: Viewer, request: Request) -> Response:
    """The page of one group: the candidates that training compared, side by side, with their rewards."""
    run = viewer.run(request)
    group_id = request.path_params["id"]
    step = whole(request.query_params.get("step"))
    recorded_step = None if step is None else step - 1  # records count from 0, pages from 1
    groups = viewer.groups(run, recorded_step)
    group_ids = [group.id for group in groups.groups]
    if group_id not in group_ids:
        raise HTTPException(
            404, f"Step {step} has no group {group_id}: its candidates may have been left out one by one."
        )
    position = group_ids.index(group_id)
    group = groups.groups[position]

    # 1. Read the calls of the samples. Several samples may be candidates of one call.
    samples_and_rewards = list(zip(group.samples, group.rewards, strict=True))[:MOST_SIBLINGS]
    call_ids = dict.fromkeys(sample.call for sample, _ in samples_and_rewards)
    records = [run.figures.call(call_id) for call_id in call_ids]
    episode = ended_episode(run, records[0].episode) if records else None
    policy = records[0].policy.name if records and records[0].policy else ""

    # 2. Show these calls, and choose the candidates that are samples of the group.
    colouring = viewer.colouring(request, run, episode, policy)
    calls = {}
    candidates = {}
    for call in show_calls(run, records, groups, whole=True, colouring=colouring):
        calls[call.record.id] = call
        candidates.update({candidate.id: candidate for candidate in call.candidates})
    shown = [(sample, reward, candidates[sample.id]) for sample, reward in samples_and_rewards]
    return viewer.page(
        request,
        "group.html",
        run,
        group=group,
        step=step,
        shown=shown,
        call=calls[group.samples[0].call],
        one_prompt=len({sample.prompt for sample in group.samples}) == 1,
        reasons=REASONS,
        earlier=group_ids[position - 1] if position else "",
        later=group_ids[position + 1] if position + 1 < len(group_ids) else "",
        **of_candidates(request, run, colouring, groups),
    )
