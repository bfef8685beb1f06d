"""Write events.jsonl: 2,000 searches with ten results each, and which of these were clicked.

A click depends on how well the text matches, on price and rating, and on how popular the brand is in the category of
the search. Halfway other brands become popular.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEARCHES = 2_000
RESULTS = 10
CATEGORIES = ("shoes", "coats", "bags")
BRANDS = 40
BEGIN = 1_767_225_600  # 1 January 2026
SECONDS_BETWEEN = 60


def results() -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    popular = random.normal(0.0, 1.5, (2, len(CATEGORIES), BRANDS))
    for search in range(SEARCHES):
        category = random.integers(len(CATEGORIES))
        for brand in random.choice(BRANDS, RESULTS, replace=False):
            match, price, rating = random.uniform(), random.lognormal(0.0, 0.5), random.uniform(1.0, 5.0)
            wish = popular[int(search >= SEARCHES / 2), category, brand] + 2.0 * match - 1.5 * price + 0.5 * rating
            yield {
                "search": f"S{search:05d}",
                "time": BEGIN + search * SECONDS_BETWEEN,
                "category": CATEGORIES[category],
                "brand": f"B{brand:02d}",
                "numbers": [round(match, 3), round(price, 3), round(rating, 1)],
                "clicked": int(wish + random.logistic(0.0, 0.5) > 2.5),
            }


def main() -> None:
    with Path("events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(result) + "\n" for result in results())


if __name__ == "__main__":
    main()
