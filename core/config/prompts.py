"""The table [prompts]: a search for better prompts, `cotune prompts improve`."""

from __future__ import annotations

import msgspec

FORKS = "forks"
OFF = "off"
"""Values of `blame` that are no reference."""


class SearchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a search for better prompts may do and spend. It also uses these settings above the tables, as a training
    run does: `prompts_file` (prompts to start from), `prices`, `roles_by`, `redact`, `seed`, `concurrency` (8 without
    a value), `episode_timeout`, `evaluation.tasks` (the held-out tasks, the only ones whose figures count; without a
    file a third of the tasks) and `sampling.max_tokens` (for answers of `run` and `model`)."""

    reflection: str | None = None
    """Model that reads what went wrong and writes new texts, at OPENAI_BASE_URL (default: OpenAI)."""
    reflection_url: str | None = None
    """Another address for it, such as http://localhost:8000/v1 of vLLM, llama.cpp or cotune serve."""
    reflection_key_env: str | None = None
    """Environment variable with the key of the reflection model. Without it OPENAI_API_KEY goes to OpenAI and to the
    address of the environment alone, and `reflection_url` gets no key."""
    max_calls: int = 2000
    """Maximum number of model calls, including the reflection model and the final comparison."""
    max_cost: float | None = None
    """Maximum cost, at the given `prices` and in their currency."""
    roles: tuple[str, ...] = ()
    """Improve only these roles: their system messages, or user messages of roles that have none."""
    keep: tuple[str, ...] = ()
    """Regular expressions of text that stays as it is."""
    minibatch: int = 4
    """Tasks on which a new text is tried first."""
    blame: str = FORKS
    """How the search finds the role to change, with at most a quarter of its limits. forks: look for the calls that
    lost failed runs, show them to the reflection model, and change roles in turn. A reference, as `cotune blame` takes
    it (openai:NAME, a model or run on this machine, prompts:FOLDER): change the role at fault. off: only in turn."""
    rounds: int = 1000
    """Maximum number of rounds of the search."""
    run: str | None = None
    """Run or export whose policies answer the calls. Without `run` and `model`, the application's provider answers."""
    model: str | None = None
    """Model that answers for all roles, untrained: a folder or a Hugging Face id."""
