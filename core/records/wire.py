"""Records as MessagePack, to send them between processes and machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cotune.json_values import plain
from cotune.records.answers import clean, storable
from cotune.records.structs import CallRecord, Episode, Message, Record


def pack(records: Sequence[Record]) -> tuple[bytes, int]:
    """Encode records as bytes. Returns also the number of records that could not be encoded, and are left out. Values
    that are not JSON are replaced as in the store."""
    try:
        return _packer.encode(records), 0
    except Exception:  # noqa: BLE001
        encoded = []  # one by one, because at least one record has a value that is not JSON
        for record in records:
            try:
                encoded.append(msgspec.Raw(_packer.encode(storable_record(record))))
            except Exception:  # noqa: BLE001
                continue  # its number is returned
        return _packer.encode(encoded), len(records) - len(encoded)


def unpack(packed: bytes) -> list[Record]:
    """Inverse of `pack`. Raises msgspec.DecodeError."""
    return _unpacker.decode(packed)


_packer = msgspec.msgpack.Encoder(enc_hook=plain)
_unpacker = msgspec.msgpack.Decoder(list[Record])
_json = msgspec.json.Encoder(enc_hook=plain)


def storable_record(record: Record) -> Record:
    """The record with only JSON values. Fields that an application or a model fills may hold other values."""
    replace = msgspec.structs.replace
    # Texts of the record itself, for example its error: half of a surrogate pair becomes its escape.
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
            params = _as_json(record.params)
            sampling = _as_json(record.sampling)
            return replace(record, params=params, sampling=sampling, candidates=candidates)
        case Episode():
            return replace(record, task=replace(record.task, input=_as_json(record.task.input)))
    return record


def _as_json(value: Any) -> Any:
    try:
        return clean(msgspec.json.decode(_json.encode(value)))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return storable(value)
