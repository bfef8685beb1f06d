"""Write events.jsonl: 20,000 payments of one day, 1 % of them fraud, and when each fraud became known.

Fraud is likelier abroad, with large amounts, soon after the card's last payment, and at some merchants.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EVENTS = 20_000
DAY = 86_400
BEGIN = 1_767_225_600  # 1 January 2026
MERCHANTS = 40
CARDS = 4_000
COUNTRIES = ("AT", "DE", "FR", "US")


def payments() -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    risks = random.normal(0.0, 1.5, MERCHANTS)
    domestic = random.integers(len(COUNTRIES), size=CARDS)
    for number in range(EVENTS):
        second = number * DAY // EVENTS
        card, merchant = random.integers(CARDS), random.integers(MERCHANTS)
        abroad = random.random() < 0.1
        country = (domestic[card] + abroad * random.integers(1, len(COUNTRIES))) % len(COUNTRIES)
        amount, minutes = random.lognormal(3.0, 1.0), random.exponential(400.0)
        risk = risks[merchant] + 2.5 * abroad + 1.2 * (np.log(amount) - 3.0) + 2.5 * np.exp(-minutes / 30)
        fraud = bool(risk + random.gumbel(0.0, 0.3) > 5.4)
        payment = {
            "payment": f"P{number:05d}",
            "time": BEGIN + second,
            "merchant": f"M{merchant:02d}",
            "country": COUNTRIES[country],
            "numbers": [round(float(np.log(amount)), 3), round(float(np.log1p(minutes)), 3)],
            "abroad": bool(abroad),
            "fraud": int(fraud),
        }
        if fraud:
            payment["known_at"] = payment["time"] + int(random.uniform(55 * 60, 65 * 60))
        yield payment


def main() -> None:
    with Path("events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(payment) + "\n" for payment in payments())


if __name__ == "__main__":
    main()
