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
    """The chat template of each base model, the run's own first; `bases` names the policies of each, and `tools` is the
    format of tool calls, of all or by base. Raises as `ChatTemplate.load`, with the policy that has another base than
    the run."""
    templates: dict[str, ChatTemplate] = {}
    for model, policies in bases.items():
        try:
            templates[model] = ChatTemplate.load(model, tools if isinstance(tools, str) else tools.get(model, AUTO))
        except ConfigError as error:
            raise (of_policy(error, policies[0]) if templates else error) from None
    return templates


def load_formats(bases: Mapping[str, Sequence[str]], tools: str | Mapping[str, str] = AUTO) -> ChatFormats:
    """The chat format of each policy, by `load_templates`."""
    (own, _), *others = bases.items()
    templates = load_templates(bases, tools)
    return ChatFormats(templates[own], {name: templates[model] for model, names in others for name in names})


@contextlib.contextmanager
def without_torch(tools: str | Mapping[str, str] = AUTO) -> Iterator[None]:
    """Templates with these formats of tool calls that are loaded within take a third of the memory and half the time,
    as transformers finds no torch.

    It changes nothing in a process that has transformers or torch already, and for a tool parser of vLLM. Afterwards
    transformers is imported anew by whoever asks for it, with torch. Not to be used while another thread imports
    transformers.
    """
    formats = [tools] if isinstance(tools, str) else tools.values()
    if "transformers" in sys.modules or "torch" in sys.modules or any(one.startswith(VLLM) for one in formats):
        yield
        return
    quiet = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"  # transformers would say that it found no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own word for "not to be found"
    try:
        yield
    finally:
        del sys.modules["torch"]
        os.environ.pop(_QUIET)
        if quiet is not None:
            os.environ[_QUIET] = quiet
        for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
            del sys.modules[name]
