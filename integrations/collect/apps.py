"""Who may write what: the tokens of applications, and of whoever runs the collector."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.types import Scope

from cotune.errors import ConfigError
from cotune.integrations.collect.batch import check_app
from cotune.integrations.web.http.requests import Access, RequestError, header

_BEARER = b"Bearer "


class Apps:
    """Applications by their tokens. `token` is that of whoever runs the collector: it may write for any application.

    Without any token only this machine may write, under any name. Raises ConfigError for a token that is an
    application's too.
    """

    def __init__(self, token: str | None = None, tokens: Mapping[str, Sequence[str]] | None = None) -> None:
        owned = {_digest(one.encode()): app for app, several in (tokens or {}).items() for one in several}
        self._apps: dict[bytes, str | None] = {**owned}
        if token:
            if app := owned.get(_digest(token.encode())):
                text = f"is the token of {app!r} too, which could write for any application"
                raise ConfigError("token", None, text, "Make another.")
            self._apps[_digest(token.encode())] = None
        self._local = Access(None)
        self.needed = bool(self._apps)

    def check(self, scope: Scope) -> str | None:
        """The application whose token a request carries; None where it may write for any. Raises RequestError."""
        if not self.needed:
            self._local.check(scope)
            return None
        given = header(scope, b"authorization")
        digest = _digest(given.removeprefix(_BEARER)) if given.startswith(_BEARER) else b""
        if digest not in self._apps:
            text = "This collector needs the application's token: send it as Authorization: Bearer TOKEN."
            raise RequestError(401, text, code="invalid_api_key")
        return self._apps[digest]

    def app(self, scope: Scope, named: str, default: str = "") -> str:
        """The application that a request writes for: that of its token, or else the one that it names, or the default.
        Raises RequestError (401, 403), or 400 where nothing names one."""
        own = self.check(scope)
        if own is not None and named not in ("", own):
            text = f"The token is that of the application {own!r}; it cannot write records of {named[:64]!r}."
            raise RequestError(403, text, param="app", code="wrong_app")
        try:
            return check_app(own or named or default)
        except ConfigError as error:
            raise RequestError(400, str(error), param="app", code="invalid_value") from None


def read_tokens(path: str | Path) -> dict[str, list[str]]:
    """The tokens of applications from a TOML file of lines such as `desk = "TOKEN"`, or `desk = ["NEW", "OLD"]`.

    Raises ConfigError.
    """
    try:
        given = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError("tokens", str(path), f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("tokens", str(path), f"is no TOML ({error})", 'Write lines such as: desk = "TOKEN"') from None
    found: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    for app, value in given.items():
        several = value if isinstance(value, list) else [value]
        for token in several or [None]:
            if not isinstance(token, str) or len(token) < 16:
                raise ConfigError(
                    f"tokens[{app!r}]", None, "must be a text of at least 16 characters, or a list of them",
                    "For example, what `openssl rand -hex 24` prints.",
                )  # fmt: skip
            if owners.setdefault(token, app) != app:
                raise ConfigError(f"tokens[{app!r}]", None, f"is the token of {owners[token]!r} too", "Make another.")
        found[check_app(app)] = several
    if not found:
        raise ConfigError("tokens", str(path), "names no application", 'Write lines such as: desk = "TOKEN"')
    return found


def _digest(token: bytes) -> bytes:
    """What tokens are looked up by, so that the time of a look-up tells nothing of them."""
    return hashlib.sha256(token).digest()
