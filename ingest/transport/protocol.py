"""The messages between the learner and its ingest process, as msgpack over a socket."""

import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from anabranch.ingest.events.block import Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import PartitionFingerprint, Position
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.decoding_mark import OffsetRange


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message: everything the process needs. Settings travel as JSON, with their secrets, never in argv."""

    stream: str
    schema: str
    hold_out: str
    positions: list[tuple[TopicPartition, Position]]
    marks: list[PartitionFingerprint]
    read_only: bool = False
    """Whether nothing is written to Kafka: no dead letters, and no positions of the consumer group."""
    traced: bool = False
    """Whether trace contexts of messages are read."""
    suspects: list[OffsetRange] = []
    """Offsets that are decoded one by one: a process died while it decoded them."""
    refused: list[tuple[int, int]] = []
    """Offsets that are dead-lettered without being decoded, each with the index of its partition."""
    path: list[str] = []
    """Where the learner finds modules: the format may be the user's, in the config's folder."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """The learner no longer reads a slot."""

    slot: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Changes nothing: reports are sent only while messages come."""


class PausePartitions(msgspec.Struct, frozen=True, tag=True):
    """Do not read these partitions, by index, and read all others, until another one comes."""

    partitions: list[int]


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Write positions for lag tools: `(index of the partition, offset)`."""

    positions: list[tuple[int, int]]


class SkipToEnd(msgspec.Struct, frozen=True, tag=True):
    """Continue at the end of every partition; a block without rows covers the skipped offsets, then `SkippedToEnd`."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class PartitionsOpened(msgspec.Struct, frozen=True, tag=True):
    """Partitions in the order of their index, where each begins, and the id of its topic.

    Sent again when partitions were added. Of those with one topic and number, the last is the latest incarnation.
    """

    partitions: list[TopicPartition]
    starts: list[int]
    ids: list[str | None]
    unread: list[int] = []
    """The indexes of partitions of which nothing is read: of topics that were taken out of the settings or created
    again, and of files where there is no history."""


class BlockReady(msgspec.Struct, frozen=True, tag=True):
    """A slot holds a block."""

    slot: int
    rows: int
    coverage: tuple[Coverage, ...]
    unknown_fields: int
    letters_dropped: dict[str, int] = {}
    """Dead letters that were not written, by reason, since the previous block."""
    contexts: list[tuple[int, str]] = []
    """Sampled trace contexts of messages, each with its row."""
    overweight: int = 0
    """Events whose weight was larger than `schema.weight.max`, and is that now."""
    tombstones: dict[str, int] = {}
    """Tombstones by the form of their key."""


class HistoryProgress(msgspec.Struct, frozen=True):
    """How far this process has read the history: over all passes, so that `files` counts a file once for each."""

    files: int
    files_done: int
    rows: int
    rows_done: int
    done: bool
    """Whether the topics are read."""
    topics: tuple[str, ...] = ()
    """Names under which the files are reported, one for each pass."""
    file: str | None = None
    """The file that is read."""


class LagReport(msgspec.Struct, frozen=True, tag=True):
    """The broker's end offsets, by index of the partition, and the problem with reaching it, if any."""

    ends: list[tuple[int, int]]
    problem: str | None
    time: float
    """When the broker was asked, by `time.monotonic` of the learner's host."""
    log_starts: list[tuple[int, int]] = []
    """The first offset that the broker still has, by index of the partition; sent every ten minutes."""
    history: HistoryProgress | None = None


class SkippedToEnd(msgspec.Struct, frozen=True, tag=True):
    """The process has skipped to the end of every partition."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process ends with an error of ours: the class name and its sentence."""

    error: str
    sentence: str


ToIngest = Begin | Release | Ping | PausePartitions | Commit | SkipToEnd | Stop
FromIngest = PartitionsOpened | BlockReady | LagReport | SkippedToEnd | Failed

_to_ingest = msgspec.msgpack.Decoder(ToIngest)
_from_ingest = msgspec.msgpack.Decoder(FromIngest)


def send(connection: Connection, message: ToIngest | FromIngest) -> None:
    """Send one message; raises BrokenPipeError or ConnectionError when the other side is gone."""
    connection.send_bytes(msgspec.msgpack.encode(message))


def receive_in_ingest(connection: Connection) -> ToIngest:
    """Receive a message of the learner; raises EOFError when it is gone."""
    message: ToIngest = _to_ingest.decode(connection.recv_bytes())
    return message


def receive_in_learner(connection: Connection) -> FromIngest:
    """Receive a message of the ingest process; raises EOFError when it is gone."""
    return from_ingest(connection.recv_bytes())


def from_ingest(message: bytes) -> FromIngest:
    """Decode a message of the ingest process."""
    decoded: FromIngest = _from_ingest.decode(message)
    return decoded


def revealed(stream: StreamSettings) -> str:
    """Return the section as JSON, with its secrets."""
    values = stream.model_dump(mode="json")
    values["properties"] = {name: value.get_secret_value() for name, value in stream.properties.items()}
    if stream.registry is not None:
        secrets = {"password": stream.registry.password, "token": stream.registry.token}
        values["registry"] |= {name: secret.get_secret_value() for name, secret in secrets.items() if secret}
    if stream.backfill is not None:
        values["backfill"]["storage"] = {k: value.get_secret_value() for k, value in stream.backfill.storage.items()}
    return msgspec.json.encode(values).decode()


def begin(
    stream: StreamSettings,
    schema: SchemaSettings,
    hold_out: HoldOut,
    positions: list[tuple[TopicPartition, Position]],
    marks: list[PartitionFingerprint],
    *,
    read_only: bool = False,
    traced: bool = False,
    suspects: Sequence[OffsetRange] = (),
    refused: Sequence[tuple[int, int]] = (),
) -> Begin:
    """Return the first message, with the settings as JSON; the other arguments are as in `Begin`."""
    return Begin(
        stream=revealed(stream),
        schema=schema.model_dump_json(),
        hold_out=hold_out.model_dump_json(),
        positions=positions,
        marks=marks,
        read_only=read_only,
        traced=traced,
        suspects=list(suspects),
        refused=list(refused),
        path=[*sys.path],
    )
