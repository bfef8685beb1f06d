"""Write events.jsonl: 20,000 orders of a shop, and whether the customer kept, exchanged or returned the article.

The outcome depends on product, channel, price, discount and customer, and on chance. Halfway half of the products get
another supplier, and their chance to be returned changes: what was true of them before is wrong from then on.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

EVENTS = 20_000
PRODUCTS = 150
CUSTOMERS = 2_000
CHANNELS = ("web", "app", "store")
OUTCOMES = ("kept", "exchanged", "returned")
BEGIN = 1_767_225_600  # 1 January 2026
SECONDS_BETWEEN = 60


def orders() -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    exchanges = random.normal(-0.5, 1.0, PRODUCTS)
    returns = random.normal(-0.5, 1.5, PRODUCTS)
    returns_later = np.where(np.arange(PRODUCTS) % 3 == 0, returns, -1.0 - returns)
    unsure = random.normal(0.0, 0.3, CUSTOMERS)
    for number in range(EVENTS):
        product, customer = random.integers(PRODUCTS), random.integers(CUSTOMERS)
        channel = random.choice(CHANNELS, p=(0.6, 0.25, 0.15))
        price, discount, earlier = random.lognormal(3.5, 0.7), random.uniform(0.0, 0.5), random.poisson(3.0)
        tendency = (returns if number < EVENTS / 2 else returns_later)[product]
        scores = np.array(
            [
                0.8 + 0.1 * earlier,
                exchanges[product] + 1.0 * (channel == "app"),
                tendency + unsure[customer] + 3.0 * discount + 0.01 * price - 1.5 * (channel == "store"),
            ]
        )
        outcome = OUTCOMES[int(np.argmax(scores + random.gumbel(0.0, 0.4, 3)))]
        order = {
            "customer": f"C{customer:04d}",
            "time": BEGIN + number * SECONDS_BETWEEN,
            "product": f"P{product:03d}",
            "channel": str(channel),
            "numbers": [round(price, 2), round(discount, 2), int(earlier)],
            "outcome": outcome,
        }
        if channel == "web" and random.random() < 0.3:
            del order["channel"]  # the default of pipeline.toml stands for it
        yield order


def main() -> None:
    with Path("events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(order) + "\n" for order in orders())


if __name__ == "__main__":
    main()
