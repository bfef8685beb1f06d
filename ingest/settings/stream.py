"""The sections `[stream]` and `[schema]` of `pipeline.toml`. Imports neither a Kafka client nor torch."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    model_validator,
)

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import Section
from anabranch.core.users_code import check_function
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.features import (
    CrossSettings,
    FeatureSettings,
    LearnedVocabulary,
    Number,
    TimeUnit,
    check_bounds,
)
from anabranch.ingest.settings.formats import FORMAT, FORMATS, REGISTRY_FORMATS, FormatKind
from anabranch.ingest.settings.kafka_properties import check, check_name
from anabranch.ingest.settings.labels import FieldPath, LabelStreamSettings, Name, TopicName, path_of
from anabranch.ingest.settings.registry import RegistrySettings


def _start(value: object) -> object:
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str) and value not in ("earliest", "latest"):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            raise ValueError('write "earliest", "latest" or an ISO time such as "2026-01-31T08:00:00Z"') from None
    return value


def _servers(value: str) -> str:
    for server in value.split(","):
        host, _, port = server.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f'"{server.strip()}" is not HOST:PORT')
    return value


def _property(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value


class LagPolicySettings(Section):
    """What to leave out when the stream is faster than training."""

    action: Literal["train-all", "sample", "store-only", "skip-to-latest"] = "train-all"
    """While the learner is behind: `train-all` trains on all events, `sample` on a fraction, `store-only` stores them
    for replay, `skip-to-latest` continues at the end of the stream."""
    high: PositiveDuration = timedelta(seconds=60)
    """The learner is behind once the oldest unread event has waited this long."""
    low: PositiveDuration = timedelta(seconds=10)
    """It is no longer behind once the oldest unread event has waited no longer than this."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """For `sample`: the fraction to train on, chosen by a hash of the identity."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be shorter than high")
        return self


class StreamSettings(Section):
    """Where events come from, and what becomes of those that cannot be used."""

    bootstrap_servers: Annotated[str, AfterValidator(_servers)] = "localhost:9092"
    """Kafka brokers to ask first, as `host:port`, separated by commas."""
    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Topics to read, with all partitions, also those added later."""
    dead_letter_topic: TopicName | None = None
    """Topic for messages that cannot be used; by default the first topic's name with `.dead` after it."""
    group_id: str | None = None
    """Consumer group under which positions are committed, for lag tools only; by default `anabranch-` and the name."""
    format: Annotated[str, FORMAT] = "json"
    """Message format: `json` is one object a message, `rows` packed little-endian rows, `arrow` an Arrow IPC stream;
    `avro`, `protobuf` and `json-schema` are one record a message, whose schema is in the registry.
    `my_code:MyFormat` is your own class."""
    format_args: dict[str, Any] = {}
    """Keyword arguments of your format."""
    envelope: Literal["none", "cloudevents", "connect", "debezium"] = "none"
    """What messages are wrapped in: nothing, CloudEvents 1.0 in structured (JSON) or binary mode, or with `json` the
    `schema` and `payload` of Kafka Connect, or Debezium's changes, with `schema` and `payload` or without."""
    deletes: Literal["erase", "skip"] = "erase"
    """What a delete of Debezium does: erase the events with its `[schema.key]`, as a tombstone; or nothing, as without
    a key."""
    registry: RegistrySettings | None = None
    """The Schema Registry of `avro`, `protobuf` and `json-schema` messages."""
    start: Annotated[str, BeforeValidator(_start)] = "earliest"
    """Where a pipeline without a checkpoint begins: `earliest`, `latest` or an ISO time."""
    on_gap: Literal["fail", "earliest"] = "fail"
    """If unread offsets are gone: stop, or continue from the earliest and count the missing ones."""
    unlabelled: Literal["skip", "store", "distil"] = "skip"
    """What to do with events without a label: skip them, store them without training on them, or learn from the output
    of `[model.teacher]` alone (`distil`)."""
    isolation_level: Literal["read_committed", "read_uncommitted"] = "read_committed"
    """Whether records of open and aborted transactions are left out."""
    client: Literal["kafka-python", "confluent"] = "kafka-python"
    """Kafka client library that reads; `confluent` (extra `fast`) is faster. `produce` always takes kafka-python."""
    token: Annotated[str, AfterValidator(check_function)] | None = None
    """Function that returns a token for SASL/OAUTHBEARER: yours (`my_auth:token`), or that of a cloud, such as
    `anabranch.ingest.kafka.tokens:msk`. It decides all of `sasl.*`; `security.protocol` is then `SASL_SSL` by default.
    """
    max_message_bytes: Annotated[ByteSize, Field(ge=1)] = ByteSize(2_000_000)
    """Messages with a longer value are dead-lettered as oversized, before they are parsed."""
    buffer_bytes: Annotated[ByteSize, Field(ge=1_000_000)] = ByteSize(64_000_000)
    """Bound of the shared memory in which blocks wait for the learner; when it is full the stream is paused."""
    lag_policy: LagPolicySettings = LagPolicySettings()
    """What is done when the stream is faster than training."""
    labels: LabelStreamSettings | None = None
    """Labels that come later than their events; absent: a label is a field of its event."""
    backfill: BackfillSettings | None = None
    """Files with earlier events, which are read before the topics; absent: the topics alone are read."""
    properties: dict[Annotated[str, AfterValidator(check_name)], Annotated[SecretStr, BeforeValidator(_property)]] = {}
    """Further client settings in librdkafka's names (`security.protocol`, `sasl.*`, `ssl.*`); others are errors."""

    def resolved(self, name: str, folder: Path = Path()) -> Self:
        """Return the section with the defaults that depend on the pipeline's name and topics filled in.

        Paths become relative to the working directory; in the file they are relative to its `folder`.
        """
        registry = self.registry
        if registry is not None:
            subject, ca = registry.subject or f"{self.topics[0]}-value", registry.ca and folder / registry.ca
            registry = registry.model_copy(update={"subject": subject, "ca": ca})
        return self.model_copy(
            update={
                "dead_letter_topic": self.dead_letter_topic or f"{self.topics[0]}.dead",
                "group_id": self.group_id or f"anabranch-{name}",
                "registry": registry,
                "backfill": self.backfill and self.backfill.below(folder),
            }
        )

    @property
    def format_kind(self) -> FormatKind:
        """What the format is."""
        return FORMAT.kind_of(self.format, FORMATS)

    @property
    def label_topics(self) -> tuple[str, ...]:
        """The topics of labels; none without `[stream.labels]`."""
        return self.labels.topics if self.labels is not None else ()

    @property
    def needs_label(self) -> bool:
        """Whether an event without a label is skipped."""
        return self.unlabelled == "skip" and self.labels is None

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The topics of events and of labels."""
        return self.topics + self.label_topics

    @property
    def client_properties(self) -> dict[str, str]:
        """The properties of clients, with those that `token` decides."""
        values = {name: secret.get_secret_value() for name, secret in self.properties.items()}
        if self.token is None:
            return values
        return {"security.protocol": "SASL_SSL", **values, "sasl.mechanism": "OAUTHBEARER"}

    @property
    def start_time(self) -> datetime | None:
        """The moment to start from, when `start` is a time; times without a zone are UTC."""
        if self.start in ("earliest", "latest"):
            return None
        moment = datetime.fromisoformat(self.start)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)

    @model_validator(mode="after")
    def _the_client_can_do_what_is_asked(self) -> Self:
        for name, value in self.properties.items():
            if self.token is not None and name.startswith("sasl."):
                raise ValueError(f"token decides how to authenticate: take {name} out of properties, or token out")
            check(self.client, name, value.get_secret_value())
        if self.token is not None and not self.client_properties["security.protocol"].upper().startswith("SASL_"):
            raise ValueError("with token, properties' security.protocol is SASL_SSL, or for tests SASL_PLAINTEXT")
        return self

    @model_validator(mode="after")
    def _the_registry_is_for_its_formats(self) -> Self:
        if self.format in REGISTRY_FORMATS and self.registry is None:
            raise ValueError(f'format = "{self.format}" reads schemas from a registry: set registry.url')
        if self.format not in REGISTRY_FORMATS and self.registry is not None:
            names = ", ".join(f'"{name}"' for name in REGISTRY_FORMATS)
            raise ValueError(f'registry is for the formats {names}, but format = "{self.format}"')
        return self

    @model_validator(mode="after")
    def _envelopes_of_connect_are_json(self) -> Self:
        if self.envelope in ("connect", "debezium") and self.format != "json":
            raise ValueError(
                f'envelope = "{self.envelope}" is for format = "json", not "{self.format}"; in Avro, name the fields '
                'of a row by field = "after.NAME"'
            )
        if self.deletes != "erase" and self.envelope != "debezium":
            raise ValueError(f'deletes = "{self.deletes}" is for envelope = "debezium", not "{self.envelope}"')
        return self

    @model_validator(mode="after")
    def _arguments_are_for_other_formats(self) -> Self:
        if self.format_args and self.format in FORMAT.names:
            raise ValueError(f'format_args are for your own format, and format = "{self.format}" takes none')
        return self

    @model_validator(mode="after")
    def _history_is_no_topic(self) -> Self:
        if self.backfill is None:
            return self
        taken = {*self.topics, *self.label_topics, self.resolved("").dead_letter_topic}
        for name in map(self.backfill.topic_of, range(self.backfill.epochs)):
            if name in taken:
                raise ValueError(f"backfill.name: {name} is the name of a topic; choose another")
        if self.backfill.shuffle and self.envelope == "debezium" and self.deletes == "erase":
            raise ValueError('backfill.shuffle does not go with deletes = "erase", which erases earlier events')
        if self.backfill.identity is not None and self.backfill.identity.topic is None and len(self.topics) > 1:
            raise ValueError("backfill.identity.topic is missing: with several topics a column has to name each row's")
        return self

    @model_validator(mode="after")
    def _dead_letters_go_elsewhere(self) -> Self:
        if len(set(self.topics)) != len(self.topics):
            raise ValueError("topics names a topic twice")
        if self.resolved("").dead_letter_topic in self.all_topics:
            raise ValueError(
                "dead_letter_topic, by default the first topic with .dead after it, must not be one of topics"
            )
        return self

    @model_validator(mode="after")
    def _labels_come_in_other_topics(self) -> Self:
        if both := set(self.topics) & set(self.label_topics):
            raise ValueError(f"labels.topics names {min(both)}, one of topics; labels come in separate topics")
        if self.labels is not None and self.unlabelled != "skip":
            raise ValueError(
                f'unlabelled = "{self.unlabelled}" contradicts [stream.labels]: events without a label wait for it; '
                'take it out, or set labels.unmatched = "store"'
            )
        return self


class LabelSettings(Section):
    """What is to be predicted."""

    name: Name
    """Name of the label."""
    field: FieldPath | None = None
    """Where it is in a message, by default the field of that name; as in `[schema.features.NAME]`."""
    dtype: Number = "int64"
    """Any numpy number; whole numbers when there are classes."""
    classes: Annotated[int, Field(ge=2)] | Annotated[tuple[str, ...], Field(min_length=2)] | None = None
    """Number of classes, labels being `0..classes-1`, or the list of their names; absent for regression."""
    multi: bool = False
    """Whether an event may have several classes: its label is then a list."""
    length: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Positions of a label that is a list of classes, such as one for each word. Longer lists are cut off at the end;
    null or missing positions train nothing. Absent: an event has one label."""
    min: int | float | None = None
    """Smallest label of a regression. An event with a smaller one is dead-lettered."""
    max: int | float | None = None
    """Largest label of a regression, likewise."""

    @model_validator(mode="after")
    def _bounds_are_of_a_number(self) -> Self:
        if self.classes is not None and (self.min is not None or self.max is not None):
            raise ValueError("min and max are bounds of a number, but labels are classes, which have their own")
        check_bounds(self.dtype, self.min, self.max)
        return self

    @model_validator(mode="after")
    def _length_is_of_classes(self) -> Self:
        if self.length is not None and (self.multi or self.classes is None):
            raise ValueError("length says that an event has one class at each position, so set classes, and not multi")
        if self.length is not None and self.dtype.startswith("uint"):
            raise ValueError(f"with length, a position without a class is -100, which dtype {self.dtype} cannot hold")
        if self.length is not None and isinstance(self.classes, tuple) and "" in self.classes:
            raise ValueError('with length, no class may be named "", which says that a position has none')
        return self

    @model_validator(mode="after")
    def _classes_are_whole(self) -> Self:
        if self.multi and self.classes is None:
            raise ValueError("multi = true says that an event has several classes, so set classes")
        if self.classes is not None and self.dtype.startswith("float"):
            raise ValueError(f"labels of {self.classes} classes are whole numbers, but dtype is {self.dtype}")
        if self.classes is None and not self.dtype.startswith("float"):
            raise ValueError(f"without classes the task is regression, which needs a float dtype, not {self.dtype}")
        if isinstance(self.classes, tuple) and len(set(self.classes)) != len(self.classes):
            raise ValueError("classes names a class twice")
        return self


class FieldSettings(Section):
    """A field other than features and label."""

    name: Name
    """Name of the field. It may be that of a feature, which is then both."""
    field: FieldPath | None = None
    """Where it is in a message, by default the field of that name; as in `[schema.features.NAME]`."""


class TimeSettings(FieldSettings):
    """The field with an event's own time."""

    unit: TimeUnit = "s"
    """What a number counts since 1970. Texts are ISO 8601, in UTC without a zone."""


class WeightSettings(FieldSettings):
    """The field with an event's weight."""

    max: Annotated[float, Field(gt=0, lt=3e38)] = 100.0
    """Larger weights count as this one, so that few events do not fill the store."""


class SchemaSettings(Section):
    """The fields of an event."""

    features: Annotated[dict[Name, FeatureSettings], Field(min_length=1)]
    """The model's inputs, by name, in the order of the file."""
    cross: dict[Name, CrossSettings] = {}
    """Further inputs, by name, after the features: combinations of categorical ones."""
    label: LabelSettings
    """What is to be predicted."""
    key: FieldSettings | None = None
    """Field that names whom an event is about (a string or a whole number). `produce` sends events of one key to one
    partition; without a group, all of a key are held out, or none."""
    time: TimeSettings | None = None
    """Field with the event's own time, stored with it; freshness uses the record's timestamp."""
    weight: WeightSettings | None = None
    """Field with the event's weight in the loss (not negative), which is also its chance to be kept for replay."""
    group: FieldSettings | None = None
    """Field by which events belong together (a string or a whole number): all of a group are held out, or none."""

    def below(self, folder: Path) -> Self:
        """Return the section with the paths of tokenizers relative to the working directory, not to `folder`."""
        return self.model_copy(
            update={"features": {name: feature.below(folder) for name, feature in self.features.items()}}
        )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [*self.features, *self.cross, self.label.name]
        names += [f"{name}_missing" for name, feature in self.features.items() if feature.missing == "indicator"]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two fields are named {name!r}")
        paths = {name: path_of(feature.field or (name,)) for name, feature in self.features.items()}
        for field in (self.key, self.time, self.weight, self.group):
            if field is None:
                continue
            path = path_of(field.field or (field.name,))
            if field.name in names and field.name not in paths:
                raise ValueError(f"two fields are named {field.name!r}")
            if paths.setdefault(field.name, path) != path:
                raise ValueError(
                    f"two fields are named {field.name!r}: {'.'.join(paths[field.name])}, {'.'.join(path)}"
                )
        label = path_of(self.label.field or (self.label.name,))
        for name, path in paths.items():
            if path == label:
                raise ValueError(f"{name} is read from {'.'.join(path)}, which is the label {self.label.name}")
        every = {*paths.values(), label}
        for path in sorted(every):
            inner = next((part for end in range(1, len(path)) if (part := path[:end]) in every), None)
            if inner is not None:
                raise ValueError(
                    f"{'.'.join(inner)} is a field, and has the field {'.'.join(path)} in it: name one of them"
                )
        return self

    @model_validator(mode="after")
    def _crossed_features_are_categorical(self) -> Self:
        for cross, settings in self.cross.items():
            for name in settings.of:
                feature = self.features.get(name)
                if feature is None:
                    raise ValueError(f"cross.{cross}.of names {name!r}, which is no feature")
                if feature.dtype.startswith("float") or feature.dtype == "uint64" or feature.is_text:
                    raise ValueError(f"cross.{cross}.of names {name!r}, which is not categorical: {feature.dtype}")
            shapes = {name: list(self.features[name].shape) for name in settings.of}
            if len({*map(tuple, shapes.values())}) > 1:
                raise ValueError(f"cross.{cross}.of names features of several shapes: {shapes}")
        return self

    @model_validator(mode="after")
    def _the_model_gets_a_feature(self) -> Self:
        if len(self.intercepts) == len(self.features) and not self.cross:
            raise ValueError(f"features has only {', '.join(self.intercepts)}, with intercept: the model gets no input")
        return self

    @property
    def intercepts(self) -> tuple[str, ...]:
        """The features that name the group of an event, which the model does not get."""
        return tuple(name for name, feature in self.features.items() if feature.intercept)

    @property
    def transformed(self) -> tuple[str, ...]:
        """The inputs of the model that are computed from features, in part by what the stream has had."""
        return (*(name for name, feature in self.features.items() if feature.transformed), *self.cross)

    @property
    def vocabularies(self) -> tuple[str, ...]:
        """The inputs that are rows of a table which grows with the stream."""
        inputs: list[tuple[str, FeatureSettings | CrossSettings]] = [*self.features.items(), *self.cross.items()]
        return tuple(name for name, each in inputs if isinstance(each.encode, LearnedVocabulary))


class HoldOut(Section):
    """Which events ingest sets aside for the holdout set; from `[gate]` and the secret of the state directory."""

    fraction: Annotated[float, Field(ge=0, lt=1)]
    seed: Annotated[int, Field(ge=0, lt=2**128, repr=False)]
    """Of the choice: without it nobody can compute which events are held out."""
