"""Messages of a topic are answered in another one while the server, and sometimes the learner, is killed repeatedly."""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from anabranch.ingest.kafka.producer import create_topics
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.serving.reporting.report import read_report
from tests.faults.figures import Figures
from tests.faults.pipeline import PATIENCE_SECONDS, POLL_SECONDS, Pipeline, Supervised, make_topic, producer
from tests.faults.serving_kills import TEXT
from tests.pipelines import LINEAR
from tests.support.ports import first_free_port
from tests.support.topics import TopicReader

PARTITIONS = 3
_EVERY = 5
"""One in so many kills is that of the learner."""
_AT_START = 1 / 3
"""Fraction of the kills that come while the server starts or joins the group; the others come while it answers."""
_LONGEST_SECONDS = 2.0
"""From the first answer to a kill; at start twice as long, from the kill before."""
_VALUE = b'{"x": [1.0, 0.0, 0.0], "y": 0}'


@dataclass(frozen=True)
class Answered:
    """The answers that a reader of committed records sees.

    Attributes:
        messages: number of messages that were sent.
        kills: number of kills.
        running: kills of a server that had answered messages since its start.
        lost: messages without an answer.
        twice: answers beyond the first to a message.
    """

    messages: int
    kills: int
    running: int
    lost: int
    twice: int
    seconds: float


class Sender:
    """Sends some hundreds of messages a second until the context ends, and counts them by partition."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._address = bootstrap, topic
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.sent: list[str] = []
        """Where each acknowledged message is, such as `inputs[0]@4711`."""

    def __enter__(self) -> "Sender":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more, and return once all is acknowledged."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        topic = self._address[1]
        with producer(*self._address) as sender:
            while not self._done.wait(POLL_SECONDS):
                for _ in range(8):
                    sender.send(_VALUE, lambda partition, offset: self.sent.append(f"{topic}[{partition}]@{offset}"))
            sender.flush()


def answered_while_killed(folder: Path, bootstrap: str, kills: int, seed: int) -> Answered:
    """Kill server or learner `kills` times at random moments, and compare answers with messages."""
    begin, dice, running = time.monotonic(), random.Random(seed), 0
    topic = make_topic(bootstrap, "inputs", PARTITIONS)
    output = f"{topic}-answers"
    create_topics(StreamSettings(bootstrap_servers=bootstrap, topics=(topic,)), {output: PARTITIONS})
    section = f'[serving.stream]\ntopics = ["{topic}"]\noutput = "{output}"\n'
    pipeline = Pipeline(folder, bootstrap, topic, LINEAR, TEXT.format(port=first_free_port()) + section)

    def answers_of(pid: int) -> int:
        report = read_report(pipeline.state_dir)
        return (
            0 if report is None or report.pid != pid or report.stream is None else sum(report.stream.messages.values())
        )

    with Supervised(pipeline, ("learner", "serving")) as parts, Sender(bootstrap, topic) as sender:
        parts.until(lambda: answers_of(parts.pid("serving")), "an answer")
        for kill in range(kills):
            if dice.random() < _AT_START:
                time.sleep(dice.uniform(0.0, 2 * _LONGEST_SECONDS))
            else:
                parts.until(lambda: answers_of(parts.pid("serving")), "an answer of the server")
                time.sleep(dice.uniform(0.0, _LONGEST_SECONDS))
            if kill % _EVERY == _EVERY - 1:
                parts.kill("learner")
            else:
                running += answers_of(parts.pid("serving")) > 0
                gone = parts.kill("serving")
                parts.until(lambda gone=gone: parts.supervisor.pids().get("serving", gone) != gone, "another server")
        sender.stop()
        expected = set(sender.sent)
        parts.until(
            lambda: (r := read_report(pipeline.state_dir)) and r.stream and r.stream.partitions and not r.stream.lag,
            "an answer to each message",
            PATIENCE_SECONDS * 2,
        )
    records = TopicReader()(bootstrap, output, 0, PATIENCE_SECONDS, "read_committed")
    found = Counter(dict(record.headers)["anabranch-source"].decode() for record in records)
    lost, twice = expected - found.keys(), found.total() - len(found)
    return Answered(len(expected), kills, running, len(lost), twice, time.monotonic() - begin)


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `answers`."""
    kills = 4 if quick else 100
    figures.part("answers", f"messages of a topic are answered in another while servers are killed {kills} times")
    done = answered_while_killed(folder, bootstrap, kills, seed=int(time.time()))
    figures.add("answer_kills", done.kills, f"{done.running} while it answered; {done.seconds:.0f} s")
    figures.add("answers_lost", done.lost, f"of {done.messages:,}")
    figures.add("answers_twice", done.twice)
