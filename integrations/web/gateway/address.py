"""Where a gateway request goes and who makes it: read from its path, its headers and its W3C baggage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import Scope

from cotune.integrations.apps.anthropic.messages import MESSAGES
from cotune.integrations.apps.openai.forms import FORMS, Form
from cotune.integrations.web.http.requests import RequestError, header, own_key

_PATH = re.compile(r"(?:/e/(?P<episode>[^/]*))?(?:/r/(?P<role>[^/]*))?/v1/(?P<tail>.*)", re.DOTALL)
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_UNSAFE = re.compile(rb"[^\x21-\x7e]")
_LONGEST = 200
_MEMBER = b"cotune."

_CALLS = {form.path.strip("/"): form for form in (*FORMS, MESSAGES)}
_METHODS = {
    "chat/completions": ("POST", "GET"),
    "chat/completions/": ("GET", "POST", "DELETE"),
    "completions": ("POST",),
    "responses": ("POST",),
    "responses/": ("GET", "POST", "DELETE"),
    "messages": ("POST",),
    "messages/count_tokens": ("POST",),
    "models": ("GET",),
    "models/": ("GET", "DELETE"),
    "embeddings": ("POST",),
}
"""Methods by path under /v1/: a name that ends in a slash stands for all paths below it."""


@dataclass(frozen=True, slots=True)
class Address:
    """The meaning of a path. `form` is set where a POST is a call; `tail` is the raw path after /v1/."""

    tail: str
    methods: tuple[str, ...]
    form: Form | None
    episode: str | None
    role: str | None


@dataclass(frozen=True, slots=True)
class Identity:
    """Who makes a call, as far as its request says: open episode, role, ids of the calls that it read, and the
    application's own key of an episode that begins with it."""

    episode: str | None
    role: str
    named: bool
    """Whether the request says its role."""
    parents: tuple[str, ...]
    key: str = ""


def address_of(scope: Scope) -> Address | None:
    """The address of a request; None where its path is of none of the interfaces.

    Raises RequestError (400) for a path that cannot be forwarded, (404) for one that is not served, (405) for another
    method than those served there.
    """
    if _UNSAFE.search(scope["query_string"]):
        raise RequestError(400, "The query holds characters that must be percent-encoded.", code="invalid_path")
    found = _parse(scope.get("raw_path") or scope["path"].encode())
    if found is not None and scope["method"] not in found.methods:
        raise RequestError(
            405,
            f"Method Not Allowed: {scope['method']} {scope['path']}.",
            code="method_not_allowed",
            headers={"allow": ", ".join(found.methods)},
        )
    return found


def _parse(raw: bytes) -> Address | None:
    found = _PATH.fullmatch(raw.decode("latin-1"))
    if found is None:
        return None
    if _UNSAFE.search(raw):
        raise RequestError(400, "The path holds characters that must be percent-encoded.", code="invalid_path")
    tail = found["tail"]
    inner = unquote(tail).split("/")
    if len(inner) > 1 and any(part in ("", ".", "..") for part in inner):
        raise RequestError(400, "The path has an empty part, or one that is . or ..", code="invalid_path")
    family = next((name for name in _METHODS if _within(tail, name)), None)
    if family is None:
        known = ", ".join(dict.fromkeys(name.rstrip("/") for name in _METHODS))
        raise RequestError(404, f"Not Found: /v1/{tail[:_LONGEST]}. Served are: {known}.", code="not_found")
    episode = None if found["episode"] is None else _id(_unquoted(found["episode"], "episode"), "episode")
    role = None if found["role"] is None else _role(_unquoted(found["role"], "role"))
    return Address(tail, _METHODS[family], _CALLS.get(tail), episode, role)


def _within(tail: str, name: str) -> bool:
    return tail.startswith(name) and len(tail) > len(name) if name.endswith("/") else tail == name


def identity(scope: Scope, address: Address, role_header: str = "") -> Identity:
    """Episode, role and parents: each from its header, else from the path, else from baggage; the role `app` without.

    `role_header` is another header that says the role. Raises RequestError (400) for one that is malformed or given
    twice.
    """
    headers: dict[str, str] = {}
    baggage: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name.startswith(b"x-cotune-"):
            field = name[9:].decode("latin-1")
            if headers.setdefault(field, _text(value, field)) != _text(value, field):
                raise RequestError(400, f"X-Cotune-{field.title()} is given twice.", code="invalid_identity")
        elif name == b"baggage" and _MEMBER in value:
            baggage.update(_members(value))
    named = header(scope, role_header.lower().encode()).decode("latin-1") if role_header else ""
    path = {"episode": address.episode, "role": address.role}
    fields: dict[str, str] = {"role": named} if named else {}
    fields |= baggage | {name: value for name, value in path.items() if value is not None} | headers
    episode, role = fields.get("episode"), fields.get("role")
    return Identity(
        None if episode is None else _id(episode, "episode"),
        "app" if role is None else _role(role),
        role is not None,
        tuple(_id(part.strip(), "parent") for part in fields.get("parents", "").split(",") if part.strip()),
        own_key(fields.get("key", "")),
    )


def without_own_members(baggage: bytes) -> bytes:
    """A baggage header without the members that are for cotune."""
    return b",".join(part for part in baggage.split(b",") if not part.strip().startswith(_MEMBER))


def _members(baggage: bytes) -> Iterator[tuple[str, str]]:
    for part in baggage.split(b","):
        if part.strip().startswith(_MEMBER):
            name, equals, value = part.partition(b";")[0].strip()[len(_MEMBER) :].partition(b"=")
            if not equals:
                raise RequestError(400, "A baggage member of cotune has no value.", code="invalid_identity")
            field = _text(name, "baggage").strip()
            yield field, _unquoted(_text(value.strip(), field), field)


def _text(value: bytes, field: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RequestError(400, f"The {field} is not UTF-8.", param=field, code="invalid_identity") from None


def _unquoted(value: str, field: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise RequestError(400, f"The {field} is not UTF-8.", param=field, code="invalid_identity") from None


def _role(value: str) -> str:
    if not value.strip() or len(value) > _LONGEST or not value.isprintable():
        text = f"A role is 1 to {_LONGEST} printable characters."
        raise RequestError(400, text, param="role", code="invalid_role")
    return value


def _id(value: str, what: str) -> str:
    if not _ID.fullmatch(value):
        text = f"This is no id of {'an' if what == 'episode' else 'a'} {what}: {value[:_LONGEST]!r}."
        raise RequestError(400, text, param=what, code=f"invalid_{what}")
    return value
