"""The section `[stream.backfill]`: files that are read before the topics. Imports no pyarrow."""

from datetime import UTC, date, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from anabranch.core.settings import Section, written

FileFormat = Literal["parquet", "jsonl", "csv"]
SUFFIXES: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
"""The format of files by the end of their name."""

_HistoryName = Annotated[str, written("[A-Za-z0-9._-]{1,200}", 'letters, digits, ".", "_" and "-", 200 at most')]


def _written_format(name: str) -> FileFormat | None:
    """Return the format that the end of a name says; JSON lines and CSV may be compressed with gzip."""
    written = SUFFIXES.get(PurePosixPath(name.removesuffix(".gz")).suffix)
    return None if written == "parquet" and name.endswith(".gz") else written


def _until(value: object) -> object:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str) and value != "stream":
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise ValueError('write "stream" or an ISO time such as "2026-01-31T08:00:00Z"') from None
    return value


class KafkaColumns(Section):
    """Columns with the place of each row in Kafka, as sinks of Kafka Connect can write them."""

    topic: str | None = None
    """Column with the topic; absent: all rows are of the only one of `stream.topics`."""
    partition: Annotated[str, Field(min_length=1)]
    """Column with the number of the partition."""
    offset: Annotated[str, Field(min_length=1)]
    """Column with the offset."""


class BackfillSettings(Section):
    """Files with earlier events, which are read before the topics: a file is a partition, and a row an offset."""

    files: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """Globs, relative to the config's folder, or URLs (`s3://`, `gs://`, `az://`, `https://`; extra `storage`). The
    learner lists the files once, at the first start."""
    format: FileFormat | None = None
    """Format of the files; by default that of their suffix (`.parquet`, `.pq`, `.jsonl`, `.ndjson`, `.csv`, `.tsv`, all
    but the first two also with `.gz`). JSON lines and CSV may be compressed with gzip under any name."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """What is between the cells of CSV; by default a tab for `.tsv`, else a comma."""
    order: Literal["name", "time", "given"] = "name"
    """Order of the files: by name, by the earliest value of the column `time`, or as `files` lists them."""
    time: Annotated[str, Field(min_length=1)] | None = None
    """Column with the time of a row (a timestamp, or seconds since 1970), which becomes its record time; by default the
    field of `[schema.time]`, where there is one."""
    until: Annotated[str, BeforeValidator(_until)] = "stream"
    """Where the topics begin: an ISO time, or `stream`, which is `stream.start`, and with `time` the moment from which
    on all partitions have their records. Later rows are left to the topics."""
    shuffle: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Rows of a window that are shuffled, in memory; 0 reads the rows in their order."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often to read the files. Only the first pass stores events and holds them out."""
    name: _HistoryName = "history"
    """Name under which the files are reported, as a topic is: their events are `history[file]@row`."""
    identity: KafkaColumns | None = None
    """Columns with topic, partition and offset: rows are events of the topics then, and are learned from once."""
    storage: dict[str, SecretStr] = {}
    """Options of the object store for URLs, in the names of obstore (`aws_region`, `aws_access_key_id`, `endpoint` and
    so on); by default they come from the environment."""

    @property
    def until_time(self) -> datetime | None:
        """The moment at which the topics begin, when `until` is a time; times without a zone are UTC."""
        if self.until == "stream":
            return None
        moment = datetime.fromisoformat(self.until)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    def format_of(self, name: str) -> FileFormat:
        """Return the format of a file; `format` is set, or all patterns end with a suffix that says it."""
        return self.format or _written_format(name) or "parquet"

    def delimiter_of(self, name: str) -> str:
        """Return what is between the cells of a CSV file."""
        return self.delimiter or ("\t" if PurePosixPath(name.removesuffix(".gz")).suffix == ".tsv" else ",")

    def below(self, folder: Path) -> Self:
        """Return the section with relative patterns below a folder."""
        files = tuple(pattern if "://" in pattern else str((folder / pattern).absolute()) for pattern in self.files)
        return self.model_copy(update={"files": files})

    def topic_of(self, repetition: int) -> str:
        """Return the name of the partitions of a pass over the files, counted from 0."""
        return f"{self.name}.{repetition + 1}" if repetition else self.name

    @model_validator(mode="after")
    def _formats_are_clear(self) -> Self:
        for pattern in self.files if self.format is None else ():
            if _written_format(pattern) is None:
                raise ValueError(
                    f'files: "{pattern}" does not end with {", ".join(SUFFIXES)}; end it so, or set format = '
                    '"parquet", "jsonl" or "csv"'
                )
        if self.identity is not None and any(self.format_of(pattern) != "parquet" for pattern in self.files):
            raise ValueError("identity needs Parquet files, whose columns of offsets are read ahead of the others")
        return self

    @model_validator(mode="after")
    def _passes_differ(self) -> Self:
        if self.epochs > 1 and self.identity is not None:
            raise ValueError("epochs > 1 and identity exclude each other: an offset of a topic is learned from once")
        if self.shuffle and self.identity is not None:
            raise ValueError("shuffle and identity exclude each other: events of a partition are read by their offset")
        return self
