"""Permissions to write: the tokens of applications, and the token of the collector's operator."""

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
    """Applications by their tokens. The operator's `token` may write for any application.

    Without any token, only programs on this machine may write, for any application. Raises ConfigError if an
    application has the same token as the operator.
    """

    def __init__(self, token: str | None = None, tokens: Mapping[str, Sequence[str]] | None = None) -> None:
        """Know the applications by digests of their tokens.

        Args:
            token: token that may write for every application.
            tokens: the tokens of each application, which may write only for it.

        Raises ConfigError if one token is both.
        """
        self._apps: dict[bytes, str | None] = {}
        for app, app_tokens in (tokens or {}).items():
            for app_token in app_tokens:
                self._apps[_digest(app_token.encode())] = app
        if token:
            digest = _digest(token.encode())
            if digest in self._apps:
                text = f"is the token of {self._apps[digest]!r} too, which could write for any application"
                raise ConfigError("token", None, text, "Make another.")
            self._apps[digest] = None
        self._local = Access(None)
        self.needed = bool(self._apps)

    def check(self, scope: Scope) -> str | None:
        """The application of a request's token; None if it may write for any application. Raises RequestError."""
        if not self.needed:
            self._local.check(scope)
            return None
        authorization = header(scope, b"authorization")
        digest = _digest(authorization.removeprefix(_BEARER)) if authorization.startswith(_BEARER) else b""
        if digest not in self._apps:
            text = "This collector needs the application's token: send it as Authorization: Bearer TOKEN."
            raise RequestError(401, text, code="invalid_api_key")
        return self._apps[digest]

    def app(self, scope: Scope, named: str, default: str = "") -> str:
        """The application for which a request writes: the application of its token, else the named one, else the
        default. Raises RequestError (401, 403, and 400 without a name)."""
        token_app = self.check(scope)
        if token_app is not None and named not in ("", token_app):
            text = f"The token is that of the application {token_app!r}; it cannot write records of {named[:64]!r}."
            raise RequestError(403, text, param="app", code="wrong_app")
        try:
            return check_app(token_app or named or default)
        except ConfigError as error:
            raise RequestError(400, str(error), param="app", code="invalid_value") from None


def read_tokens(path: str | Path) -> dict[str, list[str]]:
    """Read the tokens of applications from a TOML file with lines like `desk = "TOKEN"` or `desk = ["NEW", "OLD"]`.

    Raises ConfigError.
    """
    try:
        entries = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError("tokens", str(path), f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("tokens", str(path), f"is no TOML ({error})", 'Write lines such as: desk = "TOKEN"') from None
    tokens: dict[str, list[str]] = {}
    app_of_token: dict[str, str] = {}
    for app, value in entries.items():
        app_tokens = value if isinstance(value, list) else [value]
        for token in app_tokens or [None]:  # an empty list is an error too
            if not isinstance(token, str) or len(token) < 16:
                raise ConfigError(
                    f"tokens[{app!r}]", None, "must be a text of at least 16 characters, or a list of them",
                    "For example, what `openssl rand -hex 24` prints.",
                )  # fmt: skip
            if app_of_token.setdefault(token, app) != app:
                fault = f"is the token of {app_of_token[token]!r} too"
                raise ConfigError(f"tokens[{app!r}]", None, fault, "Make another.")
        tokens[check_app(app)] = app_tokens
    if not tokens:
        raise ConfigError("tokens", str(path), "names no application", 'Write lines such as: desk = "TOKEN"')
    return tokens


def _digest(token: bytes) -> bytes:
    """The key under which a token is stored. The time of a look-up must not depend on the token itself."""
    return hashlib.sha256(token).digest()
