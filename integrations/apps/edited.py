"""The edits of prompts in the forms that clients have for messages and tools. No object of the application is changed:
what an edit concerns is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotune.prompts.chat_texts import Kind, Said, each, map_tool


def spread(texts: Sequence[str], joint: str, new: str) -> list[str]:
    """The texts, which are recorded as one with `joint` between them, where that one becomes `new`.

    Texts that `new` begins and ends with stay as they are, so that a provider's cache keeps what it has of them. What
    lies between becomes the last of the others; these become empty.
    """
    first, last = 0, len(texts)
    start, end = 0, len(new)
    while first < last - 1 and new.startswith(texts[first] + joint, start):
        start += len(texts[first] + joint)
        first += 1
    while last > first + 1 and new.endswith(joint + texts[last - 1], start, end):
        end -= len(joint + texts[last - 1])
        last -= 1
    between = [""] * (last - first - 1) + [new[start:end]]
    return [*texts[:first], *between, *texts[last:]]


def edited_blocks(blocks: Sequence[Any], kind: Kind, said: Said, joint: str | None) -> Any:
    """A content of blocks, which is recorded as one text where all are texts (`joint` is not None), else block by
    block; `blocks` themselves where nothing changes. Blocks that become empty are left out."""
    texts = [_text(block) for block in blocks]
    known = [text for text in texts if text is not None]
    if joint is not None and len(known) == len(blocks):
        whole = said(kind, "", joint.join(known))
        new: Sequence[str | None] = known if whole is None else spread(known, joint, whole)
    else:
        new = [None if text is None else _or(text, said(kind, "", text)) for text in texts]
    if list(new) == texts:
        return blocks
    made: list[Any] = []
    marked: Any = None
    for block, old, text in zip(blocks, texts, new, strict=True):
        if text == "" and old:
            marked = block.get("cache_control", marked) if isinstance(block, Mapping) else marked
            continue
        one = block if text == old else text if isinstance(block, str) else {**block, "text": text}
        if text == old and made:  # what was cached up to a block that is left out ends with the one before
            made[-1] = _marked(made[-1], marked)
        elif text != old:
            one = _marked(one, marked)
        made.append(one)
        marked = None
    if made:
        made[-1] = _marked(made[-1], marked)
    return made


def _marked(block: Any, mark: Any) -> Any:
    if mark is None or not isinstance(block, dict) or "cache_control" in block:
        return block
    return {**block, "cache_control": mark}


def edited_tools(tools: Any, said: Said, chat: Callable[[Any], Any], described: str, schema: str) -> Any:
    """Tools of which `chat` is the form in OpenAI's chat, and whose own fields of these names hold the description and
    the schema of the parameters; `tools` themselves where nothing changes."""

    def edited(tool: Any) -> Any:
        asked = chat(tool)
        new = map_tool(asked, said)
        if new is asked:
            return tool
        was, now = (one.get("function") or one for one in (asked, new))
        names = {"description": described, "parameters": schema}
        return {**tool, **{own: now[name] for name, own in names.items() if now.get(name) is not was.get(name)}}

    return each(tools, edited)


def _text(block: Any) -> str | None:
    if isinstance(block, str):
        return block
    found = block.get("text") if isinstance(block, Mapping) and block.get("type", "text") == "text" else None
    return found if isinstance(found, str) else None


def _or(text: str, new: str | None) -> str:
    return text if new is None else new
