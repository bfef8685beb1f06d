"""The sections `[schema.features.NAME]` and `[schema.cross.NAME]`: the inputs of the model."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import Section
from anabranch.ingest.settings.labels import FieldPath, Name

Number = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
]


_MOST_OF_FLOATS = {"float16": 65504.0, "float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}
_WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
"""Numbers that a learned vocabulary takes: all are int64 too."""


class Vocabulary(Section):
    """A string becomes its index in the list, counted from 1; 0 is every other string."""

    vocab: Annotated[tuple[str, ...], Field(min_length=1)]
    """The known strings."""

    @model_validator(mode="after")
    def _words_differ(self) -> Self:
        if len(set(self.vocab)) != len(self.vocab):
            raise ValueError("vocab names a string twice")
        return self


class HashBuckets(Section):
    """A string becomes the number of a hash bucket."""

    hash: Annotated[int, Field(ge=2, le=2**31)]
    """Number of buckets; ids are in `[0, hash)`."""


class LearnedVocabulary(Section):
    """A string or whole number becomes a row of a table that grows with the stream; rare values share rows."""

    learn: Annotated[int, Field(ge=2, le=2**24)]
    """Rows of the table: ids are in `[0, learn)`, as `nn.Embedding(learn, ...)` takes them. A quarter of the rows, the
    first, is shared by values that have no row."""
    min_count: Annotated[int, Field(ge=1, le=255)] = 3
    """A value gets a row once about this many trained events have had it."""
    expire: PositiveDuration | None = None
    """A value that was not seen for this time, by record times, loses its row. By default a value loses it only to
    another one, when the table is full."""


class TokenizerFile(Section):
    """A text becomes the ids of a pretrained model's tokenizer, of the shape `[length]`."""

    tokenizer: Path
    """Path of the model's `tokenizer.json`; relative to the config's folder."""
    length: Annotated[int, Field(ge=1, le=8192)]
    """Ids of each text, with those that the tokenizer adds, such as `[CLS]`: longer texts are cut off at the end,
    shorter ones filled up with the padding id."""
    words: bool = False
    """Whether the model also gets where each word between spaces begins, as `[2, length]`: the second row has 1 + the
    index of each word's first id, and 0 after the last one."""


def _encoding(value: object) -> str | None:
    if isinstance(value, TokenizerFile) or (isinstance(value, dict) and "tokenizer" in value):
        return "text"
    if isinstance(value, Vocabulary) or (isinstance(value, dict) and "vocab" in value):
        return "vocabulary"
    if isinstance(value, LearnedVocabulary) or (isinstance(value, dict) and "learn" in value):
        return "learned"
    if isinstance(value, HashBuckets) or (isinstance(value, dict) and "hash" in value):
        return "buckets"
    return None


Encoding = Annotated[
    Annotated[Vocabulary, Tag("vocabulary")]
    | Annotated[HashBuckets, Tag("buckets")]
    | Annotated[LearnedVocabulary, Tag("learned")]
    | Annotated[TokenizerFile, Tag("text")],
    Discriminator(
        _encoding,
        custom_error_type="encoding",
        custom_error_message="write {vocab = [...]}, {hash = N}, {learn = N} or {tokenizer = PATH, length = N}",
    ),
]

Cycle = Literal["hour", "day", "week", "year"]
TimeUnit = Literal["s", "ms", "us", "ns"]


class FeatureSettings(Section):
    """One input of the model."""

    dtype: Number | Literal["string"]
    """Any numpy number, `bool`, or `string` (with `encode`)."""
    field: FieldPath | None = None
    """Where the value is in a message, by default the feature's name: `"after.amount"` is the field `amount` of the
    object `after`. A list takes names as they are: `["net.amount"]`."""
    shape: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Shape of one event's value; `[]` is a single number."""
    encode: Encoding | None = None
    """How strings become integers: `{vocab = [...]}`, `{hash = N}` or `{learn = N}` (int64), or texts the ids of a
    pretrained model, `{tokenizer = "PATH", length = N}` (int32 `[length]`, or `[2, length]` with `words = true`, after
    the feature's own shape). Whole numbers may have `{learn = N}` too."""
    scale: Literal["standard", "robust", "quantile"] | None = None
    """Scales numbers by the stream so far, to float32: `standard` by mean and standard deviation, `robust` by median
    and interquartile range, `quantile` to the part of values below, in -1..1."""
    missing: Literal["mean", "indicator"] | int | float | None = None
    """What the model gets for an absent or NaN float: the `mean` so far (with `robust` and `quantile` the median), a
    number, or with `indicator` the mean, and 1 in a further input `NAME_missing`. Without this key such events are
    dead-lettered."""
    cycles: tuple[Cycle, ...] = ()
    """For a time since 1970: the model gets its phase in these cycles, in UTC, as sine and cosine, float32
    `[*shape, 2 * cycles]`."""
    unit: TimeUnit = "s"
    """With `cycles`: what a number in a message or request counts. Texts are ISO 8601."""
    intercept: bool = False
    """Whether the feature, one with `{learn = N}`, names the event's group. The model does not get it; the learner adds
    a learned number of the group to each output."""
    default: bool | int | float | str | list[object] | None = None
    """Value of events that lack the feature; without one the feature is required."""
    min: int | float | None = None
    """Smallest value of a number. An event with a smaller one is dead-lettered, a request refused (400)."""
    max: int | float | None = None
    """Largest value of a number, likewise: `max = 6` for an embedding of 7 rows."""

    @model_validator(mode="after")
    def _strings_are_encoded(self) -> Self:
        learned = isinstance(self.encode, LearnedVocabulary)
        if learned and self.dtype in _WHOLE:
            return self
        if (self.dtype == "string") != (self.encode is not None):
            raise ValueError(
                'a feature of dtype "string" needs encode, and no other takes it, except that whole numbers of up to '
                "64 bits with a sign, or 32 without, take {learn = N}"
            )
        return self

    @model_validator(mode="after")
    def _one_transformation(self) -> Self:
        given = [name for name in ("encode", "scale", "cycles") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} exclude each other: a feature is transformed in one way")
        if self.scale is not None and self.dtype in ("bool", "string", "uint64"):
            raise ValueError(f"scale is for numbers, and dtype is {self.dtype}")
        if self.cycles and self.dtype not in ("float64", "int32", "int64", "uint32"):
            raise ValueError(f"cycles need seconds since 1970, which dtype {self.dtype} cannot hold; write int64")
        if self.unit != "s" and not self.cycles:
            raise ValueError(f'unit = "{self.unit}" is for a time, which has cycles')
        if len(set(self.cycles)) != len(self.cycles):
            raise ValueError("cycles names a cycle twice")
        if self.missing is not None and (not self.dtype.startswith("float") or self.cycles):
            raise ValueError("missing is for floats, which may be NaN; other features have default")
        if self.intercept and (not isinstance(self.encode, LearnedVocabulary) or self.shape):
            raise ValueError(
                "intercept is for a feature that is the id of a group, one for each event: a string or whole number "
                "with encode = {learn = N} and without shape"
            )
        if self.missing is not None and self.default is not None:
            raise ValueError("missing and default exclude each other: both say what an absent value becomes")
        return self

    @property
    def is_text(self) -> bool:
        """Whether the value is a text, which has several ids."""
        return isinstance(self.encode, TokenizerFile)

    @property
    def transformed(self) -> bool:
        """Whether the model gets another value than that of the event."""
        learned = isinstance(self.encode, LearnedVocabulary)
        return learned or self.scale is not None or self.missing is not None or bool(self.cycles)

    def below(self, folder: Path) -> Self:
        """Return the same with the path of a tokenizer relative to the working directory, not to `folder`."""
        if not isinstance(self.encode, TokenizerFile):
            return self
        encode = self.encode.model_copy(update={"tokenizer": folder / self.encode.tokenizer})
        return self.model_copy(update={"encode": encode})

    @model_validator(mode="after")
    def _bounds_are_values_of_the_dtype(self) -> Self:
        check_bounds(self.dtype, self.min, self.max)
        return self


def check_bounds(dtype: str, lowest: float | None, highest: float | None) -> None:
    """Raise ValueError where `min` and `max` of a dtype are no values of it, or exclude all."""
    for name, bound in (("min", lowest), ("max", highest)):
        if bound is not None:
            _check_bound(name, bound, dtype)
    if lowest is not None and highest is not None and lowest > highest:
        raise ValueError(f"min = {lowest} is larger than max = {highest}")


def _check_bound(name: str, bound: float, dtype: str) -> None:
    if dtype.startswith("float"):
        most = _MOST_OF_FLOATS[dtype]
        if not -most <= bound <= most:  # NaN is neither
            raise ValueError(f"{name} = {bound} is no {dtype}, which is {-most:.5g}..{most:.5g}")
        return
    unsigned, _, bits = dtype.partition("int")
    if not bits.isdigit():
        raise ValueError(f"min and max are bounds of numbers, but dtype is {dtype}")
    lowest = 0 if unsigned else -(2 ** (int(bits) - 1))
    highest = lowest + 2 ** int(bits) - 1
    if not isinstance(bound, int) or not lowest <= bound <= highest:
        raise ValueError(f"{name} = {bound} is no {dtype}, which is {lowest}..{highest}")


def _cross_encoding(value: object) -> str | None:
    kind = _encoding(value)
    return kind if kind in ("buckets", "learned") else None


class CrossSettings(Section):
    """A further input of the model: which values several categorical features have together, as an id."""

    of: Annotated[tuple[Name, ...], Field(min_length=2)]
    """The features that are crossed: strings, whole numbers and bools of one shape."""
    encode: Annotated[
        Annotated[HashBuckets, Tag("buckets")] | Annotated[LearnedVocabulary, Tag("learned")],
        Discriminator(
            _cross_encoding,
            custom_error_type="encoding",
            custom_error_message="write {hash = N} or {learn = N}",
        ),
    ]
    """How a combination becomes an id, int64: `{hash = N}` or `{learn = N}`."""

    @model_validator(mode="after")
    def _features_differ(self) -> Self:
        if len(set(self.of)) != len(self.of):
            raise ValueError("of names a feature twice")
        return self
