"""Write events.jsonl: 12,000 short messages to a support desk, and the topics of each.

The messages are made of word lists, with a fixed seed. Most have one topic, some two, and a few none. Words of other
topics occur too, so that one word alone proves nothing. In the second half
every other topic word is from a list of new words.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EVENTS = 12_000
WORDS = 12  # `shape` in pipeline.toml
TOPICS = {
    "billing": "invoice charge refund card price tax receipt payment | subscription voucher rebate bank debit fee",
    "delivery": "parcel late shipment tracking address depot driver arrive | locker pickup customs doorstep van route",
    "login": "password reset account email code locked sign name | passkey fingerprint session token captcha phone",
    "product": "broken battery screen cable noise hot button scratch | firmware hinge sensor charger lens filter",
    "praise": "thanks great love happy friendly quick perfect helpful | brilliant superb kind pleasant smooth glad",
}
COMMON = "i you the a my is was not it and to for with please again today can have this your still why when"


def tickets() -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    names, common = list(TOPICS), COMMON.split()
    words = {name: [part.split() for part in text.split("|")] for name, text in TOPICS.items()}
    for number in range(EVENTS):
        topics = sorted(random.choice(names, size=random.choice(3, p=(0.1, 0.6, 0.3)), replace=False).tolist())
        text = []
        for _ in range(random.integers(5, 15)):
            kind = random.random()
            if kind < 0.5:
                text.append(pick(random, common))
                continue
            topic = pick(random, topics if topics and kind < 0.9 else names)
            before, later = words[topic]
            text.append(pick(random, later if number >= EVENTS / 2 and random.random() < 0.5 else before))
        yield {**features(" ".join(text)), "topics": topics}


def pick(random: np.random.Generator, words: list[str]) -> str:
    return words[random.integers(len(words))]


def features(text: str) -> dict[str, Any]:
    """Return what the model gets of a text: its first words, filled up with empty strings, and how many they are."""
    words = re.findall(r"\w+", text.lower())[:WORDS] or [""]
    return {"words": words + [""] * (WORDS - len(words)), "length": len(words)}


def main() -> None:
    with Path("events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(ticket) + "\n" for ticket in tickets())


if __name__ == "__main__":
    main()
