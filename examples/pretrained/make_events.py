"""Write events.jsonl: 8,000 short messages to a support desk, and the topic of each.

The messages are made of word lists, with a fixed seed. Words of other topics occur too, so that one word alone proves
nothing. In the second half every other topic word is from a list of new words.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EVENTS = 8_000
TOPICS = {
    "billing": "invoice charge refund card price tax receipt payment | subscription voucher rebate bank debit fee",
    "delivery": "parcel late shipment tracking address depot driver arrive | locker pickup customs doorstep van route",
    "login": "password reset account email code locked sign name | passkey fingerprint session token captcha phone",
    "product": "broken battery screen cable noise hot button scratch | firmware hinge sensor charger lens filter",
}
COMMON = "i you the a my is was not it and to for with please again today can have this your still why when"


def tickets() -> Iterator[dict[str, str]]:
    random = np.random.default_rng(0)
    names, common = list(TOPICS), COMMON.split()
    words = {name: [part.split() for part in text.split("|")] for name, text in TOPICS.items()}
    for number in range(EVENTS):
        topic = pick(random, names)
        text = []
        for _ in range(random.integers(5, 15)):
            kind = random.random()
            if kind < 0.5:
                text.append(pick(random, common))
                continue
            before, later = words[topic if kind < 0.85 else pick(random, names)]
            text.append(pick(random, later if number >= EVENTS / 2 and random.random() < 0.5 else before))
        yield {"text": " ".join(text), "topic": topic}


def pick(random: np.random.Generator, words: list[str]) -> str:
    return words[random.integers(len(words))]


def main() -> None:
    with Path("events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(ticket) + "\n" for ticket in tickets())


if __name__ == "__main__":
    main()
