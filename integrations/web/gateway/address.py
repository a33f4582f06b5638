"""Reads the interface, the episode and the role of a gateway request from its path, headers and W3C baggage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import unquote

from starlette.types import Scope

from cotune.integrations.apps.anthropic.messages import MESSAGES
from cotune.integrations.apps.openai.forms import FORMS, Form
from cotune.integrations.web.http.requests import RequestError, checked_key, header

_PATH = re.compile(r"(?:/e/(?P<episode>[^/]*))?(?:/r/(?P<role>[^/]*))?/v1/(?P<tail>.*)", re.DOTALL)
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_UNSAFE = re.compile(rb"[^\x21-\x7e]")
_LONGEST = 200
_MEMBER = b"cotune."

_FORM_OF_TAIL = {form.path.strip("/"): form for form in (*FORMS, MESSAGES)}
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
"""Path under /v1/ -> its methods. A path that ends in a slash stands for all paths below it."""


@dataclass(frozen=True, slots=True)
class Address:
    """The meaning of a path. `form` is set if a POST is a call; `tail` is the raw path after /v1/."""

    tail: str
    methods: tuple[str, ...]
    form: Form | None
    episode: str | None
    role: str | None


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a call, as far as its request states it."""

    episode: str | None
    """Id of the open episode that it belongs to."""
    role: str
    named: bool
    """Whether the request names its role."""
    parents: tuple[str, ...]
    """Ids of the calls whose answers it read."""
    key: str = ""
    """The application's key for the episode, if the episode begins with this call."""


def address_of(scope: Scope) -> Address | None:
    """The address of a request; None if its path belongs to none of the interfaces.

    Raises RequestError (400) for a path that cannot be forwarded, (404) for one that is not served, (405) for a method
    that is not served there.
    """
    if _UNSAFE.search(scope["query_string"]):
        raise RequestError(400, "The query holds characters that must be percent-encoded.", code="invalid_path")
    address = _parse(scope.get("raw_path") or scope["path"].encode())
    if address is not None and scope["method"] not in address.methods:
        raise RequestError(
            405,
            f"Method Not Allowed: {scope['method']} {scope['path']}.",
            code="method_not_allowed",
            headers={"allow": ", ".join(address.methods)},
        )
    return address


def _parse(raw: bytes) -> Address | None:
    """The address in a path of the gateway; None for any other path. Raises RequestError for an unsafe or unknown path
    below it.
    """
    match = _PATH.fullmatch(raw.decode("latin-1"))
    if match is None:
        return None
    if _UNSAFE.search(raw):
        raise RequestError(400, "The path holds characters that must be percent-encoded.", code="invalid_path")
    tail = match["tail"]
    # A part such as .. must not lead the provider to another path than the one that is checked here.
    parts = unquote(tail).split("/")
    if len(parts) > 1 and any(part in ("", ".", "..") for part in parts):
        raise RequestError(400, "The path has an empty part, or one that is . or ..", code="invalid_path")
    methods = _methods_of(tail)
    if methods is None:
        served = ", ".join(dict.fromkeys(name.rstrip("/") for name in _METHODS))
        raise RequestError(404, f"Not Found: /v1/{tail[:_LONGEST]}. Served are: {served}.", code="not_found")
    episode = role = None
    if match["episode"] is not None:
        episode = _checked_id(_unquote_field(match["episode"], "episode"), "episode")
    if match["role"] is not None:
        role = _checked_role(_unquote_field(match["role"], "role"))
    return Address(tail, methods, _FORM_OF_TAIL.get(tail), episode, role)


def _methods_of(tail: str) -> tuple[str, ...] | None:
    """The methods of a path under /v1/; None for a path that is not served."""
    for name, methods in _METHODS.items():
        if tail == name and not name.endswith("/"):
            return methods
        if name.endswith("/") and tail.startswith(name) and len(tail) > len(name):
            return methods
    return None


def caller_identity(scope: Scope, address: Address, role_header: str = "") -> Identity:
    """Who makes a call: episode, role, parent calls and key.

    Each field is taken from its header, else from the path, else from baggage. If none of them has the role, it comes
    from the header `role_header`, else it is `app`. Raises RequestError (400) for a field that is malformed or passed
    twice.
    """
    headers, baggage = _identity_fields(scope)
    # Later sources overwrite earlier ones.
    fields: dict[str, str] = {}
    if role_header and (value := header(scope, role_header.lower().encode())):
        fields["role"] = value.decode("latin-1")
    fields |= baggage
    if address.episode is not None:
        fields["episode"] = address.episode
    if address.role is not None:
        fields["role"] = address.role
    fields |= headers
    episode = fields.get("episode")
    role = fields.get("role")
    parents = [part.strip() for part in fields.get("parents", "").split(",")]
    return Identity(
        episode=None if episode is None else _checked_id(episode, "episode"),
        role="app" if role is None else _checked_role(role),
        named=role is not None,
        parents=tuple(_checked_id(parent, "parent") for parent in parents if parent),
        key=checked_key(fields.get("key", "")),
    )


def _identity_fields(scope: Scope) -> tuple[dict[str, str], dict[str, str]]:
    """The fields of an identity in the X-Cotune-* headers of a request, and those in its baggage."""
    headers: dict[str, str] = {}
    baggage: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name.startswith(b"x-cotune-"):
            field = name.removeprefix(b"x-cotune-").decode("latin-1")
            text = _decode_field(value, field)
            if headers.setdefault(field, text) != text:
                raise RequestError(400, f"X-Cotune-{field.title()} is given twice.", code="invalid_identity")
        elif name == b"baggage" and _MEMBER in value:
            baggage.update(_baggage_members(value))
    return headers, baggage


def without_own_members(baggage: bytes) -> bytes:
    """A baggage header without the members that are for cotune."""
    return b",".join(part for part in baggage.split(b",") if not part.strip().startswith(_MEMBER))


def _baggage_members(baggage: bytes) -> Iterator[tuple[str, str]]:
    """The fields of cotune in a `baggage` header, with their values. Fields of other programs are skipped."""
    for part in baggage.split(b","):
        if part.strip().startswith(_MEMBER):
            # A member has the form `cotune.FIELD=VALUE`, and may have properties after a semicolon.
            member = part.partition(b";")[0].strip()
            name, equals, value = member.removeprefix(_MEMBER).partition(b"=")
            if not equals:
                raise RequestError(400, "A baggage member of cotune has no value.", code="invalid_identity")
            field = _decode_field(name, "baggage").strip()
            yield field, _unquote_field(_decode_field(value.strip(), field), field)


def _decode_field(value: bytes, field: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise RequestError(400, f"The {field} is not UTF-8.", param=field, code="invalid_identity") from None


def _unquote_field(value: str, field: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise RequestError(400, f"The {field} is not UTF-8.", param=field, code="invalid_identity") from None


def _checked_role(value: str) -> str:
    if not value.strip() or len(value) > _LONGEST or not value.isprintable():
        text = f"A role is 1 to {_LONGEST} printable characters."
        raise RequestError(400, text, param="role", code="invalid_role")
    return value


def _checked_id(value: str, field: str) -> str:
    if not _ID.fullmatch(value):
        text = f"This is no id of {'an' if field == 'episode' else 'a'} {field}: {value[:_LONGEST]!r}."
        raise RequestError(400, text, param=field, code=f"invalid_{field}")
    return value
