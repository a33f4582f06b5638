"""Applies the edits of prompts to messages and tools in the forms of several clients.

No object of the application is changed: edited objects are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotune.prompts.chat_texts import Kind, ReplaceText, map_list, map_tool


def divide_text(texts: Sequence[str], joint: str, new: str) -> list[str]:
    """Divide an edited text among the texts of a message's blocks. They were recorded as one text, joined by `joint`,
    and `new` replaces it.

    Blocks at the beginning and at the end whose texts `new` repeats stay unchanged, so that a provider's prompt cache
    still has them. The last of the other blocks gets the remainder of `new`, and those before it become empty.
    """
    # The texts before `first_changed` and from `after_changed` on stay. new[start:end] is for the texts between them,
    # which are at least one.
    first_changed = 0
    after_changed = len(texts)
    start = 0
    end = len(new)
    while first_changed < after_changed - 1 and new.startswith(texts[first_changed] + joint, start):
        start += len(texts[first_changed] + joint)
        first_changed += 1
    while after_changed > first_changed + 1 and new.endswith(joint + texts[after_changed - 1], start, end):
        end -= len(joint + texts[after_changed - 1])
        after_changed -= 1
    n_emptied = after_changed - first_changed - 1
    return [*texts[:first_changed], *[""] * n_emptied, new[start:end], *texts[after_changed:]]


def edited_blocks(blocks: Sequence[Any], kind: Kind, replace_text: ReplaceText, joint: str | None) -> Any:
    """The content of a message, as blocks, with edited texts; `blocks` itself if no text changes.

    If all blocks are texts and `joint` is not None, they are recorded, and so edited, as one text joined by it.
    Otherwise each block is edited alone. Blocks that become empty are removed.
    """
    texts = [_block_text(block) for block in blocks]
    new_texts = _edited_texts(texts, kind, replace_text, joint)
    if new_texts == texts:
        return blocks
    return _with_new_texts(blocks, texts, new_texts)


def _edited_texts(
    texts: Sequence[str | None], kind: Kind, replace_text: ReplaceText, joint: str | None
) -> list[str | None]:
    """The texts of a message's blocks after the edits of its prompt; None for a block without a text, such as an image.

    If all blocks have a text, the message was recorded as one text, in which `joint` stands between the blocks. Then
    this text is edited. With `joint` None, each block is edited alone.
    """
    present_texts = [text for text in texts if text is not None]
    new_texts = list(texts)
    if joint is not None and len(present_texts) == len(texts):
        edited_text = replace_text(kind, "", joint.join(present_texts))
        if edited_text is not None:
            new_texts[:] = divide_text(present_texts, joint, edited_text)
        return new_texts
    for position, text in enumerate(texts):
        if text is not None:
            edited_text = replace_text(kind, "", text)
            if edited_text is not None:
                new_texts[position] = edited_text
    return new_texts


def _with_new_texts(
    blocks: Sequence[Any], old_texts: Sequence[str | None], new_texts: Sequence[str | None]
) -> list[Any]:
    """The blocks with `new_texts`. A block whose text has become empty is removed.

    The mark "cache_control" of a block tells the provider to cache the prompt up to there. The mark of a removed block
    moves to the block before it if the next block is unchanged, otherwise to the next block, which replaces it.
    """
    content: list[Any] = []
    mark_of_removed: Any = None  # of the blocks removed since the last block in `content`
    for block, old_text, new_text in zip(blocks, old_texts, new_texts, strict=True):
        has_become_empty = new_text == "" and old_text
        if has_become_empty:
            if isinstance(block, Mapping):
                mark_of_removed = block.get("cache_control", mark_of_removed)
            continue
        if new_text == old_text:
            if content:
                content[-1] = _with_cache_mark(content[-1], mark_of_removed)
            content.append(block)
        else:
            new_block = new_text if isinstance(block, str) else {**block, "text": new_text}
            content.append(_with_cache_mark(new_block, mark_of_removed))
        mark_of_removed = None
    if content:
        content[-1] = _with_cache_mark(content[-1], mark_of_removed)
    return content


def _with_cache_mark(block: Any, mark: Any) -> Any:
    if mark is None or not isinstance(block, dict) or "cache_control" in block:
        return block
    return {**block, "cache_control": mark}


def edited_tools(
    tools: Any, replace_text: ReplaceText, to_chat: Callable[[Any], Any], description_field: str, parameters_field: str
) -> Any:
    """The tools of a client with edited texts; `tools` itself if no text changes.

    `to_chat` translates a tool to OpenAI's chat form. The client's form has the description of a tool in the field
    `description_field`, and the schema of its parameters in the field `parameters_field`.
    """

    def edit_one_tool(tool: Any) -> Any:
        """One tool with its edited texts, in the client's form. It is edited in chat form, and the fields that this has
        changed are replaced.
        """
        chat_tool = to_chat(tool)
        edited_tool = map_tool(chat_tool, replace_text)
        if edited_tool is chat_tool:
            return tool
        old_function = chat_tool.get("function") or chat_tool
        new_function = edited_tool.get("function") or edited_tool
        changes = {}
        if new_function.get("description") is not old_function.get("description"):
            changes[description_field] = new_function["description"]
        if new_function.get("parameters") is not old_function.get("parameters"):
            changes[parameters_field] = new_function["parameters"]
        return {**tool, **changes}

    return map_list(tools, edit_one_tool)


def _block_text(block: Any) -> str | None:
    """The text of a block; None for a block of another kind."""
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and block.get("type", "text") == "text":
        text = block.get("text")
        return text if isinstance(text, str) else None
    return None
