"""Settings that earlier versions had, and what to use instead.

A configuration with one of these names is rejected with the text of its row. Add a row when you remove a setting.
"""

from __future__ import annotations

from cotune.algorithms.catalogue import REMOVED as REMOVED_OF_RECIPES
from cotune.errors import ConfigError

_NO_PAST = "Leave it out: present versions play all roles. Train roles in turns with train in [[policy]]."

REMOVED: dict[str, str] = {
    "prompts.prompts": "Use prompts_file, above the tables.",
    "prompts.kinds": "Leave it out: system messages are improved, and user messages of roles that have none.",
    "prompts.eval_tasks": "Use evaluation.tasks, which training reads too. The flag is still --eval-tasks.",
    "prompts.max_tokens": "Use sampling.max_tokens, which training reads too.",
    "prompts.timeout": "Use episode_timeout, above the tables.",
    "prompts.reflection_params": "Leave it out: the reflection model answers with its own defaults.",
    "prompts.max_growth": "Leave it out: a new text may have 1.5 times the characters of the old one, and 500 more.",
    "prompts.weight": "Leave it out: the mean of the roles' own scorers counts half as much as the outcome.",
    "prompts.validation": "Leave it out: four tenths of the tasks choose between candidates.",
    "prompts.shown": "Leave it out: the reflection model sees three runs each time.",
    "prompts.credit": 'Use prompts.blame = "off" for credit = 0. An analysis takes at most a quarter of the limits.',
    "prompts.replay": "Leave it out: calls before the first one of a changed role are answered from the record.",
    "prompts.temperature": "Leave it out: the application's own temperature is used.",
    "lora.alpha": "Leave it out: it is twice lora.rank.",
    "policy.lora.alpha": "Leave it out: it is twice the rank.",
    "overrides": "Use [loss] for terms of the loss, such as loss.clip_high, and [rewards] for rewards, such as "
    "rewards.weights.",
    "policy.overrides": "Use loss and rewards of the policy, such as loss = {clip_high = 0.28}.",
    "team_weight": "Use rewards.team_weight.",
    "cluster.colocate": "Leave it out: an engine and a learner share a GPU if the machine has one.",
    "cluster.engine": "Use engine, above the tables.",
    "cluster.engine_args": "Use [engine_args].",
    "cluster.engine_timeout": "Leave it out: an engine that does not answer for 60 seconds is restarted.",
    "cluster.engine_url": 'Write the address as engine, above the tables: engine = "http://HOST:8000".',
    "engine_url": 'Write the address as engine: engine = "http://HOST:8000".',
    "cluster.gpus_per_learner": "Leave it out: a learner has a GPU if there are any, and half of the engine's with "
    "gpus_per_engine = 0.5.",
    "cluster.learner_timeout": "Leave it out: learners that wait for each other for 30 minutes count as lost.",
    "cluster.placement": "Leave it out: learners are placed on as few machines as possible.",
    "cluster.pools": "Leave it out: the learners train all policies in turn.",
    "learner.activation_checkpointing": "Leave it out: layers are computed again where a row would not fit otherwise.",
    "learner.device": "Leave it out: the first GPU learns. CUDA_VISIBLE_DEVICES=1 chooses another, and an empty "
    "CUDA_VISIBLE_DEVICES the CPU.",
    "learner.epochs": "Leave it out: an update passes over its rows once. More steps: a smaller learner.mini_batch.",
    "learner.eps": "Leave it out: AdamW's epsilon is 1e-8.",
    "learner.grad_clip": "Leave it out: a gradient's norm is bounded to 1.",
    "learner.micro_batch_tokens": "Leave it out: passes are as large as fits. Set learner.memory to bound the memory.",
    "learner.seed": "Use seed.",
    "learner.shared_prompts": "Leave it out: what rows have in common is computed once if the model allows it.",
    "learner.tree_attention": "Leave it out: a GPU takes the faster of SDPA and FlexAttention.",
    "replay.continuations": "Leave it out: later calls of a branch are trained on, except with recipe c3.",
    "profile": "Pass --profile to cotune train: it traces one step; see docs/how-to/profile.md.",
    "records.best_of": "Use records.min_reward: it takes the answers of all episodes that did well enough.",
    "refill.groups": "Leave it out: each role is to have as many groups as in the step's own tasks.",
    "refill.draw": "Leave it out: a refill draws further tasks. Raise plan.k for larger groups of the same task.",
    "replay.freeze": 'Use replay.tools = "frozen".',
    "routing.past": _NO_PAST,
    "routing.pool": _NO_PAST,
    "routing.pool_every": _NO_PAST,
    "routing.swap_every": "Leave it out: the roles of routing.swap exchange their policies every 5 steps.",
    "max_staleness": "Leave it out: in mode async, samples are at most one version behind.",
    "schedule.warmup": "Leave it out: a gradient's norm is bounded, and clips and the KL penalty bound early steps.",
    "strategy": "Run cotune prompts improve, then cotune train --prompts FOLDER; see docs/how-to/prompts.md.",
    "keep_checkpoints": "Leave it out: a run keeps its two newest checkpoints, the guard's, and with "
    "evaluation.keep_best the best ones.",
    "guard.action": 'Use guard = "off", "warn" or "stop", above the tables. To go back: cotune export RUN --step N.',
    "guard.window": "Leave it out: the guard compares means over 5 steps.",
    "guard.min_entropy": "Leave it out: an entropy that harms lowers the reward, which the guard watches.",
    "guard.max_gap": "Leave it out: the bound is 0.25 nats a token.",
    "curriculum.by": 'Use curriculum.pool = "by:FIELD".',
    "curriculum.level_steps": "Leave it out: each level, and all tasks in the end, have an equal part of the steps.",
    "curriculum.k_easy": 'Leave it out, or use curriculum.pool = "adaptive", which draws easy tasks less often.',
    "curriculum.floor": "Leave it out: an adaptive pool draws a tenth of its tasks alike.",
    "evaluation.best_by": "Leave it out: success judges, or where it is not known what each policy is trained on.",
    "sampling.threads": "Leave it out: a core each, or one thread for a model of less than 16 million parameters. "
    "OMP_NUM_THREADS sets another number.",
    "learner.threads": "Leave it out: a core each, or one thread for a model of less than 16 million parameters. "
    "OMP_NUM_THREADS sets another number.",
    "sampling.timeout": "Use episode_timeout: an answer may take half of it.",
    "sampling.prefix_cache": "Use sampling.repeatable = true for a run that can be repeated exactly.",
    "learner.weight_decay": "Leave it out: weights do not decay. loss.kl holds them to the untrained model.",
    "policy.weight_decay": "Leave it out: weights do not decay. loss.kl holds them to the untrained model.",
    "records.held_out": "Leave it out: a tenth of the tasks is held out, from 10 tasks on.",
    "records.version": "Leave it out, and choose by time with records.since.",
    "dpo": "Leave it out: beta is 0.1. How far the policy moves depends on learner.lr and steps too.",
    "dpo.length_normalised": "Leave it out: sums over an answer's tokens are compared.",
    "curriculum.easy": "Leave it out: a task with a mean reward of 0.6 or more is easy.",
    "replay.forks_per_episode": "Use replay.budget.",
    "evaluation.limit": "Leave it out, and name a shorter file of held-out tasks in evaluation.tasks.",
}
"""By dotted name, such as "learner.seed" ("policy.NAME" for a field of [[policy]], "prompts.NAME" for an option of a
search for prompts): a sentence that tells the user what to do, such as "Use seed." """
for _name, _text in REMOVED_OF_RECIPES.items():
    for _table in ("rewards", "loss", "policy.rewards", "policy.loss"):
        REMOVED[f"{_table}.{_name}"] = _text


def removed_setting(field: str, value: object) -> ConfigError | None:
    """The error for a setting that was removed, or None if `field` never existed or still does.

    A field of a removed table is looked up by the name of the table: "pools.size" finds the row "pools".
    """
    parts = field.split(".")
    for length in range(len(parts), 0, -1):
        remedy = REMOVED.get(".".join(parts[:length]))
        if remedy is not None:
            return ConfigError(field, value, "was removed from the configuration", remedy)
    return None
