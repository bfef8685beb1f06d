"""Read payments.scores, and raise alerts for as many payments as the budget permits: python read_alerts.py [servers]

It ends once each payment has a score, and prints how many frauds the alerts of the last two hours have found.
"""

import json
import sys
from collections import deque
from pathlib import Path

from kafka import KafkaConsumer

BUDGET = 0.01
HOURS_OF_DAY = 24


def main(servers: str = "localhost:9092") -> None:
    events = [json.loads(line) for line in Path("events.jsonl").read_text(encoding="utf-8").splitlines()]
    consumer = KafkaConsumer(
        "payments.scores",
        bootstrap_servers=servers,
        auto_offset_reset="earliest",
        isolation_level="read_committed",  # one answer to each payment, also after a crash
    )
    recent: deque[float] = deque(maxlen=2_000)
    answered, alerts = set(), set()
    for record in consumer:
        payment, score = record.key.decode(), json.loads(record.value)["probabilities"][1]
        if sum(other > score for other in recent) < BUDGET * len(recent):
            alerts.add(payment)
        recent.append(score)
        answered.add(payment)
        if len(answered) == len(events):
            break
    last = events[-2 * len(events) // HOURS_OF_DAY :]
    raised = [event["fraud"] for event in last if event["payment"] in alerts]
    frauds = sum(event["fraud"] for event in last)
    sys.stdout.write(
        f"{len(answered):,} scores\n"
        f"the last two hours: {len(raised)} alerts for {len(last):,} payments found {sum(raised)} of {frauds} frauds\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
