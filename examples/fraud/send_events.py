"""Send events.jsonl: python send_events.py [seconds that its day takes] [servers]

Each payment goes to `payments` at its time, and each fraud to `chargebacks` when it became known.
"""

import json
import sys
import time
from pathlib import Path

from kafka import KafkaProducer

DAY = 86_400


def main(seconds: str = "60", servers: str = "localhost:9092") -> None:
    messages = []
    for line in Path("events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        fraud, known_at = event.pop("fraud"), event.pop("known_at", 0)
        messages.append((event["time"], "payments", event))
        if fraud:
            messages.append((known_at, "chargebacks", {"payment": event["payment"], "fraud": fraud}))
    messages.sort(key=lambda message: message[0])
    begin, first = time.time(), messages[0][0]
    producer = KafkaProducer(bootstrap_servers=servers, acks="all", linger_ms=5)
    for known, topic, message in messages:
        due = begin + (known - first) * float(seconds) / DAY
        time.sleep(max(0.0, due - time.time()))
        key, value = message["payment"].encode(), json.dumps(message).encode()
        producer.send(topic, key=key, value=value, timestamp_ms=int(due * 1000))
    producer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
