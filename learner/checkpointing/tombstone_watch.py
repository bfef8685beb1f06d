"""Says that tombstones have keys that no event has, so that what they order to erase stays."""

from collections.abc import Callable, Mapping

from ingest.events.key_forms import PLAIN

_MANY = 10
"""Tombstones with keys of the right form that may all erase nothing: their events may have left the store."""


class TombstoneWatch:
    """Compares the tombstones that were read with the events that were erased. Thread-safe."""

    def __init__(self, forms: Callable[[], Mapping[str, int]], erased: Callable[[], int]) -> None:
        """Take functions that return the tombstones since the start by the form of their key, and the erased events."""
        self._forms = forms
        self._erased = erased

    @property
    def warning(self) -> str | None:
        """One sentence when tombstones have keys of another form than `[schema.key]`, or none has erased an event."""
        forms, erased = dict(self._forms()), self._erased()
        total, others = sum(forms.values()), {form: n for form, n in forms.items() if form != PLAIN}
        foreign = sum(others.values())
        if erased and foreign in (0, total):  # with one form alone, it is that of the events
            return None
        if foreign:
            named = ", ".join(f"{form} ({n:,})" for form, n in sorted(others.items()))
            return (
                f"{foreign:,} of {total:,} tombstones have a key in another form than the text of [schema.key], and "
                f"erase nothing: {named}; let the connector write the key as text, or erase with anabranch replay erase"
            )
        if not erased and total >= _MANY:
            return (
                f"none of {total:,} tombstones has erased an event that is stored: is their key, byte for byte, the "
                "text of [schema.key]?"
            )
        return None
