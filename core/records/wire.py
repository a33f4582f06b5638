"""Records as MessagePack: what crosses between processes and machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cotune.json_values import plain
from cotune.records.answers import clean, storable
from cotune.records.structs import CallRecord, Episode, Message, Record


def pack(records: Sequence[Record]) -> tuple[bytes, int]:
    """Records as bytes, and how many of them could not be encoded. What is no JSON becomes what the store keeps."""
    try:
        return _packer.encode(records), 0
    except Exception:  # noqa: BLE001
        kept = []
        for record in records:
            try:
                kept.append(msgspec.Raw(_packer.encode(storable_record(record))))
            except Exception:  # noqa: BLE001
                continue  # counted in what is returned
        return _packer.encode(kept), len(records) - len(kept)


def unpack(packed: bytes) -> list[Record]:
    """Inverse of `pack`. Raises msgspec.DecodeError."""
    return _unpacker.decode(packed)


_packer = msgspec.msgpack.Encoder(enc_hook=plain)
_unpacker = msgspec.msgpack.Decoder(list[Record])
_json = msgspec.json.Encoder(enc_hook=plain)


def storable_record(record: Record) -> Record:
    """The record with JSON values only, also where an application or a model may have put anything."""
    replace = msgspec.structs.replace
    # Texts of the record itself, such as its error: half of a surrogate pair becomes its escape.
    texts = {name: clean(value) for name, value in msgspec.structs.asdict(record).items() if isinstance(value, str)}
    record = replace(record, **texts)
    match record:
        case Message():
            return replace(record, body=_as_json(record.body))
        case CallRecord():
            candidates = tuple(
                replace(candidate, text=clean(candidate.text), message=_as_json(candidate.message))
                for candidate in record.candidates
            )
            params, sampling = _as_json(record.params), _as_json(record.sampling)
            return replace(record, params=params, sampling=sampling, candidates=candidates)
        case Episode():
            return replace(record, task=replace(record.task, input=_as_json(record.task.input)))
    return record


def _as_json(value: Any) -> Any:
    try:
        return clean(msgspec.json.decode(_json.encode(value)))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return storable(value)
