"""Decodes messages of one kind, and rejects those that cannot be decoded, whatever the reason."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from anabranch.core.failures import panics_are_errors
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.events.tokenizer import UnencodableError
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Format, Headers, Reject, joined, nothing

log = logging.getLogger(__name__)


class ValueDecoder:
    """Decodes with a format; a message that makes it raise is rejected alone."""

    def __init__(self, message_format: Format, schema: Schema, most_bytes: int) -> None:
        """Values of more than `most_bytes` are rejected before they are parsed."""
        self._format = message_format
        self._schema = schema
        self._most_bytes = most_bytes

    def decode(
        self, values: Sequence[bytes | None], headers: Sequence[Headers], faults: Mapping[int, str]
    ) -> tuple[Decoded, str | None]:
        """Decode the messages with a value of allowed size; reject the others. Also return what the format raised.

        `faults` are reasons to reject messages, by index, that are known before decoding.
        """
        refused = [
            Reject(index, WHOLE_MESSAGE, faults.get(index) or _unfit(value))
            for index, value in enumerate(values)
            if value is None or len(value) > self._most_bytes or index in faults
        ]
        if not refused:
            return self._decode_fair([value for value in values if value is not None], headers)
        out = {reject.message for reject in refused}
        indexes = np.array([index for index in range(len(values)) if index not in out], np.int32)
        fair = [value for index in indexes.tolist() if (value := values[index]) is not None]
        decoded, fault = self._decode_fair(fair, [headers[index] for index in indexes.tolist()])
        return joined([decoded.at(indexes), nothing(self._schema, refused)]), fault

    def _decode_fair(self, values: Sequence[bytes], headers: Sequence[Headers]) -> tuple[Decoded, str | None]:
        """Decode messages together; if the format raises, decode each alone."""
        fault = None
        try:
            with panics_are_errors():
                return self._format.decode(values, headers), None
        except MemoryError:
            raise  # not caused by a message
        except UnencodableError:
            pass  # which message's it is shows below
        except Exception as exc:
            log.exception("a bug in decoding: the messages are decoded one by one, those that raise are dead-lettered")
            fault = _named(exc)
        parts = [
            self._decode_one(value, own).at(np.array([index], np.int32))
            for index, (value, own) in enumerate(zip(values, headers, strict=True))
        ]
        return joined(parts), fault

    def _decode_one(self, value: bytes, headers: Headers) -> Decoded:
        try:
            with panics_are_errors():
                return self._format.decode([value], [headers])
        except MemoryError:
            raise
        except UnencodableError as exc:
            return nothing(self._schema, [Reject(0, WHOLE_MESSAGE, str(exc))])
        except Exception as exc:  # noqa: BLE001 logged for the batch, and named in the dead letter
            return nothing(self._schema, [Reject(0, WHOLE_MESSAGE, f"internal: {_named(exc)}")])


def _unfit(value: bytes | None) -> str:
    return "null value" if value is None else f"oversized: {len(value)} bytes"


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"
