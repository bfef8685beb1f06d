"""The registry of stateful parts restores what it saved."""

from typing import Any

import pytest

from learner.checkpointing.stateful import StatefulPart, restore_states, states_of


def parts_over(values: dict[str, Any], order: list[str]) -> dict[str, StatefulPart]:
    def part(name: str) -> StatefulPart:
        def restore(state: object) -> None:
            order.append(name)
            values[name] = state

        return StatefulPart(lambda: values[name], restore)

    return {name: part(name) for name in ("ledger", "rates")}


def test_all_parts_are_restored_in_the_order_of_the_registry() -> None:
    values, order = {"ledger": [1], "rates": {"a": 2}}, list[str]()
    states = states_of(parts_over(values, order))
    assert states == values
    other: dict[str, Any] = {}
    restore_states(parts_over(other, order), {**dict(reversed(states.items())), "trainer": None})
    assert (other, order) == (values, ["ledger", "rates"])


def test_a_missing_state_is_an_error() -> None:
    with pytest.raises(KeyError, match="rates"):
        restore_states(parts_over({}, []), {"ledger": []})
