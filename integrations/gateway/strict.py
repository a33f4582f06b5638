"""What a policy needs to know of a chat request, checked before it samples: a provider would check it itself."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from cotune.integrations.http.requests import RequestError

_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
_Limit = Annotated[int, msgspec.Meta(ge=1, le=_INT32)]


class _Sampling(msgspec.Struct, frozen=True):
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_INT32)] | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    stream_options: dict[str, Any] | None = None


def check_sampling(body: dict[str, Any]) -> None:
    """Raises RequestError (400) that names the parameter which is out of range."""
    try:
        msgspec.convert(body, _Sampling)
    except msgspec.ValidationError as error:
        text, _, path = str(error).rpartition(" - at `$.")
        param = path.rstrip("`") or None
        raise RequestError(400, f"{param}: {text}.", param=param, code="invalid_value") from None
