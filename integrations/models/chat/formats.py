"""The chat templates of a run: one for each base model of its policies."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from cotune.errors import ConfigError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.tool_formats import AUTO, VLLM
from cotune.integrations.models.folder.folder import of_policy
from cotune.sampling.protocol import ChatFormats

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_templates(
    bases: Mapping[str, Sequence[str]], tools: str | Mapping[str, str] = AUTO
) -> dict[str, ChatTemplate]:
    """The chat template of each base model.

    `bases` maps base models to the policies on them; the run's own base is first. `tools` is the format of tool calls,
    for all bases or for each. Raises the same errors as `ChatTemplate.load`; an error of another base than the run's
    names its policy.
    """
    templates: dict[str, ChatTemplate] = {}
    for model, policies in bases.items():
        try:
            templates[model] = ChatTemplate.load(model, tools if isinstance(tools, str) else tools.get(model, AUTO))
        except ConfigError as error:
            if not templates:  # the run's own base
                raise
            raise of_policy(error, policies[0]) from None
    return templates


def load_formats(bases: Mapping[str, Sequence[str]], tools: str | Mapping[str, str] = AUTO) -> ChatFormats:
    """The chat format of each policy. `bases` has the policies of each base model; the first base is the run's own, and
    its format is used for all policies that are not named. For `tools` see `load_templates`."""
    templates = load_templates(bases, tools)
    run_base, *other_bases = bases
    template_of_policy: dict[str, ChatTemplate] = {}
    for model in other_bases:
        template_of_policy |= dict.fromkeys(bases[model], templates[model])
    return ChatFormats(templates[run_base], template_of_policy)


@contextlib.contextmanager
def without_torch(tools: str | Mapping[str, str] = AUTO) -> Iterator[None]:
    """Load templates inside the block without torch, in half the time and with a third of the memory.

    The block has no effect in a process that has loaded transformers or torch already, and for a tool parser of vLLM.
    After the block, transformers is removed from the loaded modules, so that its next import finds torch. Do not use it
    while another thread imports transformers.
    """
    formats = [tools] if isinstance(tools, str) else tools.values()
    needs_vllm = any(name.startswith(VLLM) for name in formats)
    if "transformers" in sys.modules or "torch" in sys.modules or needs_vllm:
        yield
        return
    quiet = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"  # transformers would warn that it found no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes an import of torch raise ImportError
    try:
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(_QUIET)
        if quiet is not None:
            os.environ[_QUIET] = quiet
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]
