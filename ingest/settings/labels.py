"""The section `[stream.labels]`: labels that come later than their events, in separate topics."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import Section, written

Name = Annotated[
    str, written("[A-Za-z_][A-Za-z0-9_]*", 'letters, digits and "_", and no digit first, such as "amount"')
]


def _check_path(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    parts = path_of(value)
    if not all(parts) or not 1 <= len(parts) <= _MOST_PARTS:
        raise ValueError(
            f'write the names of 1 to {_MOST_PARTS} fields with dots between, such as "after.amount", or as a list '
            'where a name has a dot: ["net.amount"]'
        )
    return value


def path_of(field: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the fields that lead to a value, the outermost first."""
    return tuple(field.split(".")) if isinstance(field, str) else field


_MOST_PARTS = 16
FieldPath = Annotated[str | tuple[str, ...], AfterValidator(_check_path)]
"""Where a value is in a message: names of fields with dots between, or a list of them."""
TopicName = Annotated[str, written("[A-Za-z0-9._-]{1,249}", 'letters, digits, ".", "_" and "-", 249 at most')]


class LabelStreamSettings(Section):
    """Topics with labels that come later. An event without a label waits for its label."""

    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)]
    """Topics to read labels from, in the format of the events; each message has a key and a label."""
    key: Name | None = None
    """Field that is equal in an event and its label; by default `[schema.key]`. Its values should be unique for each
    event: several events of one key each get the first label."""
    name: Name | None = None
    """Field of the label in the messages of `topics`; by default the name of `[schema.label]`."""
    wait: PositiveDuration
    """How long an event waits for its label, by record times; a label without its event is kept as long."""
    unmatched: Literal["negative", "drop", "store"] = "drop"
    """What to do with an event whose label did not come: `negative` trains on it with the first class (0), `drop` skips
    it, `store` stores it without training on it."""
    early: Literal["none", "negative-then-correct"] = "none"
    """`negative-then-correct` trains on each event as a negative at once, and again as a positive if its label says so,
    with weights that correct for it (Ktena et al. 2019); for two classes."""
    take_back: bool = False
    """Whether a positive label within another `wait` after its event timed out undoes the negative, by the weight of
    the positive; for two classes and `unmatched = "negative"`."""
    bytes: Annotated[ByteSize, Field(ge=1_000_000)] = ByteSize(1_000_000_000)
    """Disk space for waiting events, allocated at the start; when it is full, the oldest time out early."""

    @model_validator(mode="after")
    def _early_negatives_stay_negatives(self) -> Self:
        if self.early != "none" and self.unmatched != "negative":
            raise ValueError(
                f'early = "{self.early}" trains on events as negatives, which unmatched = "{self.unmatched}" '
                'contradicts; set unmatched = "negative"'
            )
        if self.take_back and self.unmatched != "negative":
            raise ValueError(
                f'take_back = true takes negatives back, and unmatched = "{self.unmatched}" makes none; '
                'set unmatched = "negative"'
            )
        if len(set(self.topics)) != len(self.topics):
            raise ValueError("topics names a topic twice")
        return self
