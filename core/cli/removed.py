"""Commands and flags of earlier versions, and their replacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REMOVED_COMMANDS: Mapping[str, str] = {
    "judge": "Use cotune records judge.",
    "report": "Use cotune show RUN --html FILE.",
    "runs": "Use cotune show FOLDER.",
    "score": "Use cotune records score.",
    "sft": "Use cotune records sft.",
}
"""A sentence with the replacement for each removed command."""

_SEARCH_FIRST = "Run cotune prompts improve, which has it, then cotune train --prompts FOLDER."
_TRUST = "Set COTUNE_TRUST_REMOTE_CODE=1 in the environment."
_FIXED = "The limit is fixed."

REMOVED_FLAGS: Mapping[str, str] = {
    "check --answer": "Use --answers: a small model, provider, or records:ADDRESS (what cotune trace recorded).",
    "trace --record-tools": "Use --record tools.",
    "trace --freeze": "Use --record frozen.",
    "export --best": "Use --step best.",
    "check --roles-by": "Use --set roles_by=WHO.",
    "show --profile": "cotune train --profile writes a trace of one step: open it at https://ui.perfetto.dev.",
    "train --strategy": "Run cotune prompts improve, then cotune train --prompts FOLDER; see docs/how-to/prompts.md.",
    "train --reflection": _SEARCH_FIRST,
    "train --reflection-url": _SEARCH_FIRST,
    "train --reflection-key-env": _SEARCH_FIRST,
    "train --max-calls": "Use --set max_calls=N for the calls of an episode. A search for prompts has its own.",
    "train --max-cost": _SEARCH_FIRST,
    "train --price": _SEARCH_FIRST,
    "train --yes": _SEARCH_FIRST,
    "train --select": "Use --set plan.select=argmax, sample or first.",
    "train --concurrency": "Use --set concurrency=N.",
    "train --max-tokens": "Use --set sampling.max_tokens=N.",
    "train --seed": "Use --set seed=N.",
    "train --on-failure": "Use --set on_failure=HOW.",
    "train --roles-by": "Use --set roles_by=WHO.",
    "train --redact": "Use --set redact=MODULE:FUNCTION.",
    "train --mode": "Use --set mode=async.",
    "train --since": "Use --set records.since=SINCE.",
    "train --app": "Use --set records.app=APP.",
    "train --version": "Use --set records.since=SINCE, to choose episodes by time.",
    "train --labels": "Use --set records.labels=FILE.",
    "train --min-reward": "Use --set records.min_reward=X.",
    "train --best-of": "Use --set records.min_reward=X: it takes the answers of all episodes that did well enough.",
    "train --logger": "Use --set 'loggers=[\"tensorboard\"]', with the names of all trackers.",
    "prompts improve --reflection-url": "Use --set reflection_url=URL.",
    "prompts improve --reflection-key-env": "Use --set reflection_key_env=NAME.",
    "prompts improve --roles": "Use --set 'roles=[\"ROLE\"]', with the names of all roles to improve.",
    "prompts improve --kinds": "Leave it out: system messages are improved, and user messages of roles that have none.",
    "prompts improve --keep": "Use --set \"keep=['REGEX']\".",
    "prompts improve --max-growth": "A new text may have 1.5 times the characters of the old one, and 500 more.",
    "prompts improve --prompts": "Use --set prompts_file=FILE.",
    "prompts improve --weight": "The mean of the roles' own scorers counts half as much as the outcome.",
    "prompts improve --minibatch": "Use --set minibatch=N.",
    "prompts improve --validation": "Four tenths of the tasks choose between candidates.",
    "prompts improve --shown": "The reflection model sees three runs each time.",
    "prompts improve --credit": "Use --set blame=off for --credit 0. An analysis takes a quarter at most.",
    "prompts improve --rounds": "Use --set rounds=N.",
    "prompts improve --seed": "Use --set seed=N.",
    "prompts improve --concurrency": "Use --set concurrency=N.",
    "prompts improve --timeout": "Use --set episode_timeout=SECONDS.",
    "prompts improve --temperature": "The application's own temperature is used.",
    "prompts improve --max-tokens": "Use --set sampling.max_tokens=N.",
    "prompts improve --roles-by": "Use --set roles_by=WHO.",
    "prompts improve --redact": "Use --set redact=MODULE:FUNCTION.",
    "prompts edit --limit": "Pass a shorter file to --tasks.",
    "prompts edit --max-calls": "Pass a shorter file to --tasks: each task is run twice.",
    "prompts show --records": "Use cotune trace --out FOLDER first, then cotune prompts show FOLDER.",
    "eval --limit": "Pass a shorter file to --tasks.",
    "trace --otlp-content": "Use cotune otel export RUN --endpoint URL --content afterwards.",
    "records score --phase": "Leave it out: all phases are scored.",
    "records judge --groups": "Leave it out: the candidates of 30 calls are written.",
    "gateway --max-values": _FIXED,
    "gateway --max-answer": _FIXED,
    "gateway --max-inflight": _FIXED,
    "collect --max-values": _FIXED,
    "serve --max-values": _FIXED,
    "doctor --trust-remote-code": _TRUST,
    "train --trust-remote-code": _TRUST,
    "eval --trust-remote-code": _TRUST,
    "replay --trust-remote-code": _TRUST,
    "export --trust-remote-code": _TRUST,
    "serve --trust-remote-code": _TRUST,
    "prompts improve --trust-remote-code": _TRUST,
}
"""A sentence with the replacement for each removed flag of a command. Add a row when you remove a flag."""


def removed_flag(words: Sequence[str]) -> str:
    """The error for the first removed flag of a command line without its program, or an empty text.

    Call it before argparse parses the line, which may take a removed flag for the abbreviation of another one.
    """
    for word in words:
        if word == "--":  # only positional arguments follow
            break
        flag = word.partition("=")[0]
        for command in (words[0], " ".join(words[:2])):  # cotune train, cotune prompts improve
            if remedy := REMOVED_FLAGS.get(f"{command} {flag}"):
                return f"{command}: {flag} was removed. {remedy}"
    return ""
