"""The contract of a file's rows and of their decoder, whatever the format."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.core.failures import panics_are_errors
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.events.tokenizer import UnencodableError
from anabranch.ingest.formats.base import Decoded, Reject, joined, nothing

CHUNK_ROWS = 32_768
"""Most rows that are decoded together: calls of numpy cost little then."""
CHUNK_BYTES = 8_000_000
"""Most bytes of events that are decoded together."""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seek:
    """A row, and the byte at which it begins, in formats that need it to find this row and those after it."""

    row: int
    byte: int


class FileRows(NamedTuple):
    """An Arrow table of consecutive rows.

    Attributes:
        table: the rows.
        row: the index of the first one in the file.
        hint: of this row or an earlier one; None in formats that need no hint.
    """

    table: Any
    row: int
    hint: Seek | None = None


class RowTables(ABC):
    """An open file of rows. Used by one thread."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows; may read the file."""

    @property
    @abstractmethod
    def schema(self) -> Any:
        """The Arrow schema of the rows."""

    def problem(self) -> str | None:
        """Return why the file as a whole has no rows of its format, if so."""
        return None

    def is_null(self, column: str) -> bool:
        """Return whether a column is known to have no value."""
        del column
        return False

    @abstractmethod
    def tables(self, columns: Sequence[str], row: int, hint: Seek | None = None) -> Iterator[FileRows]:
        """Yield tables of consecutive rows from `row` on; `hint` is of this row or an earlier one, if any is known."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class Decoder(ABC):
    """Decodes K rows of a table; a bad row raises nothing: it becomes a reject."""

    def __init__(self, schema: Schema) -> None:
        """Take the fields of the rows."""
        self._schema = schema

    @abstractmethod
    def columns_in(self, schema: Any) -> list[str]:
        """Return the columns of an Arrow schema that are read."""

    @abstractmethod
    def problem(self, schema: Any) -> str | None:
        """Return why files of this Arrow schema cannot be used, if so."""

    @abstractmethod
    def decode(self, table: Any) -> Decoded:
        """Decode K rows: message `k` is row `k`."""

    def decode_all(self, table: Any) -> Decoded:
        """Decode K rows as `decode` does; where it raises, decode each alone, and reject those that make it raise."""
        try:
            with panics_are_errors():
                return self.decode(table)
        except MemoryError:
            raise  # not caused by a row
        except UnencodableError:
            pass  # which row's it is shows below
        except Exception:
            log.exception("a bug in decoding: the rows are decoded one by one, those that raise are dead-lettered")
        return joined(
            [nothing(self._schema), *(self._decode_one(table.slice(row, 1), row) for row in range(table.num_rows))]
        )

    def _decode_one(self, row: Any, index: int) -> Decoded:
        try:
            with panics_are_errors():
                return self.decode(row).at(np.array([index], np.int32))
        except MemoryError:
            raise
        except UnencodableError as exc:
            return nothing(self._schema, [Reject(index, 0, str(exc))])
        except Exception as exc:  # noqa: BLE001 logged for all rows, and named in the dead letter
            return nothing(self._schema, [Reject(index, 0, f"internal: {type(exc).__name__}: {exc}")])

    @abstractmethod
    def times_ms(self, table: Any) -> NDArray[np.int64]:
        """Return the record time of each row, int64 `[K]`: milliseconds since 1970, 0 where there is none."""

    @abstractmethod
    def text(self, table: Any, row: int) -> bytes:
        """Return a row as a JSON object, for its dead letter."""
