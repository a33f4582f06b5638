"""Starts and ends of LangChain's runs, seen at the managers that report them to callback handlers.

Not by a handler of our own: LangChain does more for every run as soon as there is one, which costs about as much as
recording the call. Outside an episode each hook costs one read of a ContextVar.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.callbacks import manager as managers

from cotune.integrations.apps.patching import replace_method
from cotune.integrations.versions import missing_hook
from cotune.recording.context import current_episode
from cotune.recording.recorder import LiveEpisode

Observer = Callable[[LiveEpisode, Any, tuple[Any, ...], Mapping[str, Any]], object]
"""Takes the episode, the manager of one run (`run_id`, `parent_run_id`, `metadata`), and the event's arguments."""
_KINDS = {"chain": "Chain", "tool": "Tool", "retriever": "Retriever", "llm": "LLM"}
_LIKE = ("", "Async")


def on_start(event: str, observe: Observer) -> None:
    """Call `observe` after every `on_chain_start`, `on_tool_start`, `on_retriever_start` or `on_chat_model_start`.

    Raises UnsupportedVersion.
    """
    for like in _LIKE:
        _replace(f"{like}CallbackManager", event, _async_start if like else _start, observe)


def on_end(event: str, observe: Observer) -> None:
    """Call `observe` before every `on_<kind>_end` or `on_<kind>_error`, also where no handler hears of it.

    Raises UnsupportedVersion.
    """
    for like in _LIKE:
        _replace(f"{like}CallbackManagerFor{_KINDS[event.split('_')[1]]}Run", event, _end, observe)


def _replace(name: str, event: str, wrapper: Callable[..., Any], observe: Observer) -> None:
    cls: type | None = getattr(managers, name, None)
    if cls is None or not callable(vars(cls).get(event)):
        raise missing_hook("langchain-core", f"{name}.{event}")
    replace_method(cls, event, lambda original: wrapper(original, observe))


def _start(original: Any, observe: Observer) -> Any:
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        episode = current_episode.get()
        if episode is not None:
            _started(episode, made, observe, args, kwargs)
        return made

    return start


def _async_start(original: Any, observe: Observer) -> Any:
    async def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = await original(self, *args, **kwargs)
        episode = current_episode.get()
        if episode is not None:
            _started(episode, made, observe, args, kwargs)
        return made

    return start


def _started(
    episode: LiveEpisode, made: Any, observe: Observer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """`made` is the run; a chat model starts one for each of its prompts."""
    try:
        if not isinstance(made, list):
            observe(episode, made, args, kwargs)
            return
        prompts = args[1] if len(args) > 1 else kwargs.get("messages") or ()
        for run, prompt in zip(made, prompts, strict=False):
            observe(episode, run, (None, [prompt]), kwargs)
    except Exception as error:  # noqa: BLE001
        _count(episode, error)


def _end(original: Any, observe: Observer) -> Any:
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:  # awaitable where the original is
        episode = current_episode.get()
        if episode is not None:
            try:
                observe(episode, self, args, kwargs)
            except Exception as error:  # noqa: BLE001
                _count(episode, error)
        return original(self, *args, **kwargs)

    return end


def _count(episode: LiveEpisode, error: Exception) -> None:
    """A fault of the recorder's own must not become the application's."""
    episode.warn("langgraph", "The LangGraph integration failed.", error)
