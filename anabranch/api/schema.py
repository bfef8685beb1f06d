"""The fields of events, from data."""

import tomllib
from collections.abc import Mapping
from typing import Any, Self

from anabranch.api.data import arrays_of, rows_of
from anabranch.api.sections import checked
from anabranch.commands.init.sample import ROWS, described_rows
from anabranch.ingest.events import schema as events
from anabranch.ingest.settings.stream import SchemaSettings

_MOST_VALUES = 2_000_000
"""Numbers that `Schema.infer` reads: of wide events it takes fewer."""
_FEWEST_ROWS = 100


class Schema(events.Schema):
    """The fields of an event: the inputs of the model, and what is to be predicted."""

    def __init__(self, settings: SchemaSettings | Mapping[str, Any]) -> None:
        """Take the keys of `[schema]` of `pipeline.toml`, such as `{"features": {"x": {"dtype": "float32"}}, "label":
        {"name": "y", "classes": 2}}`.

        Raises:
            AnabranchError: a key is wrong; a sentence says which.
        """
        super().__init__(checked(SchemaSettings, "schema", settings, "Schema"))
        self.left_out: tuple[str, ...] = ()
        """A sentence for each column that `infer` has left out."""

    @classmethod
    def infer(cls, data: Any, label: str, *, key: str | None = None) -> Self:
        """Return the schema of data, as `anabranch init --from` decides it from a file.

        Numbers are scaled, strings become categories or rows of a table that grows, times become cycles; ids, texts and
        columns that give the label away are left out. `left_out` says which, and why.

        Args:
            data: N events: a dict of arrays `[N, ...]`, or a data frame of pandas, polars or Arrow. The first 10,000
                are read, of wide events fewer.
            label: name of the column to predict. Strings, booleans and whole numbers from 0 up to 999 are classes,
                other numbers a regression.
            key: name of the column that says whom an event is about. By default the first id.

        Raises:
            AnabranchError: there is no such column, or none that can be a feature.

        Example:
            >>> schema = Schema.infer({"x": [0.5, 1.5, 2.5], "y": [0, 1, 0]}, label="y")
            >>> schema.label.classes
            2
        """
        arrays = arrays_of(data)
        values = sum(array[:1].size for array in arrays.values())
        rows = rows_of(arrays, min(ROWS, max(_FEWEST_ROWS, _MOST_VALUES // max(1, values))))
        files, remarks = described_rows(rows, "the data", label, key, "data", "data", (), option="")
        found = cls(tomllib.loads(files["pipeline.toml"])["schema"])
        found.left_out = tuple(remarks)
        return found

    def __repr__(self) -> str:
        classes = f"{self.label.classes} classes" if self.label.classes else "a number"
        return f"Schema({', '.join(feature.name for feature in self.features)} -> {self.label.name}: {classes})"
