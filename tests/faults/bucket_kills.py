"""Random SIGKILLs of a learner, and of the S3 server to which it uploads its state, by the accounts of `kills.py`.

Some kills take the state directory with them, as the loss of a host does. At the end a learner with an empty state
directory goes on from the object store, and learns the rest of the stream. Each weight must be 1 then.
"""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.core.object_store.bucket import BucketAwayError
from tests.faults.figures import Figures
from tests.faults.kills import (
    CODE,
    LEAST_A_SECOND,
    LIFE_SECONDS,
    PARTITIONS,
    ROW,
    STEP_SECONDS,
    TEXT,
    accounts,
    is_exact,
    messages_of,
    parts_of,
)
from tests.faults.pipeline import PATIENCE_SECONDS, Pipeline, Supervised, make_topic, send
from tests.learner.object_storage.uploading import torn
from tests.pipelines import total
from tests.support.s3 import RestartableS3, S3Prefix, started_s3

_STORAGE = """
[storage]
lease = "4s"
"""
_STORE_KILLS, _LOST_HOSTS = 1 / 3, 1 / 3
"""Fraction of the kills that are of the server; and of those of the learner, the fraction that take its disk."""


@dataclass
class StoreAccount:
    """The outcome of a stream.

    Attributes:
        kills: number of kills.
        store: those of the S3 server.
        hosts: those that took the state directory too.
        torn: folders that the head listed and that were not complete.
        lost: events with weight 0.
        twice: events that were trained more than once.
        exact: whether each weight is a whole number, and the ledger counts each outcome exactly.
    """

    kills: int = 0
    store: int = 0
    hosts: int = 0
    torn: list[str] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    exact: bool = False
    seconds: float = 0.0


def killed_with_its_store(folder: Path, bootstrap: str, events: int, kills: int, seed: int) -> StoreAccount:
    """Train on a stream of `events` events while the learner or the S3 server is killed `kills` times."""
    with started_s3(folder.with_name("s3")) as server:
        dice, done, begin = random.Random(seed), StoreAccount(), time.monotonic()
        batch = max(2, round(events * STEP_SECONDS / (kills * LIFE_SECONDS)))
        topic, prefix = make_topic(bootstrap, "stored", PARTITIONS), server.prefix()
        text = TEXT.format(events=events, batch=batch, checkpoint_every="1s") + _STORAGE + prefix.toml
        pipeline = Pipeline(folder, bootstrap, topic, CODE, text)
        messages = list(messages_of(events, dice))
        bad = sum(1 for message in messages if len(message) % ROW.itemsize)
        *parts, rest = parts_of(messages, kills + 1)
        with Supervised(pipeline) as learner:
            for part in parts:
                send(bootstrap, topic, part)
                # A first start without the server ends with the sentence that says so, and is not repeated.
                if dice.random() < 2 / 3 or not done.kills:
                    learner.wait_for(lambda report: report.steps_since_start > 0, "first step")
                time.sleep(dice.uniform(0.0, 2.0))
                _kill(learner, server, dice, done)
                done.torn += _torn(prefix)
            learner.wait_for(
                lambda report: report.storage is not None and report.storage.lag_seconds.get("checkpoints") == 0,
                "a checkpoint in the object store",
            )
        pipeline.state_dir.rename(folder / "lost")
        with Supervised(pipeline) as learner:
            send(bootstrap, topic, rest)
            left = PATIENCE_SECONDS + events / LEAST_A_SECOND
            last = learner.wait_for(
                lambda report: total(report) >= events + bad, "an outcome for every event", patience=left
            )
        done.torn += _torn(prefix)
    weights, finished = accounts(pipeline), pipeline.report()
    done.lost, done.twice = int((weights == 0).sum()), int((weights > 1).sum())
    whole = not (weights != weights.round()).any() and not (weights < 0).any()
    done.exact = whole and all(report is not None and is_exact(report, events, bad) for report in (last, finished))
    done.seconds = time.monotonic() - begin
    return done


def _kill(learner: Supervised, server: RestartableS3, dice: random.Random, done: StoreAccount) -> None:
    """Kill the server, or the learner, alone or with its disk; return once another one runs."""
    done.kills += 1
    if dice.random() < _STORE_KILLS:
        done.store += 1
        server.kill()
        time.sleep(dice.uniform(0.0, 2.0))
        server.start()
        return
    pid = learner.kill()
    # Before the next one opens it; a learner that was killed as it started may have left none.
    if dice.random() < _LOST_HOSTS and learner.pipeline.state_dir.exists():
        done.hosts += 1
        learner.pipeline.state_dir.rename(learner.pipeline.folder / f"lost-{done.hosts}")
    learner.until(lambda: learner.supervisor.pids().get("learner", pid) != pid, "another learner")


def _torn(prefix: S3Prefix) -> list[str]:
    """Return what is wrong with folders that the head lists, unless they are being deleted."""
    for _ in range(100):
        try:
            return torn(prefix.bucket)
        except (BucketAwayError, AssertionError):  # the server has just started, or there is no head yet
            time.sleep(0.1)
    return ["the head cannot be read"]


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `bucket`."""
    kills, events = (5, 20_000) if quick else (100, 200_000)
    figures.part("bucket", f"{kills} SIGKILLs of a learner or of its S3 server in a stream of {events:,} events")
    done = killed_with_its_store(folder, bootstrap, events, kills, seed=int(time.time()))
    what = f"{done.store} of the server, {done.hosts} with the disk of the learner; {done.seconds:.0f} s"
    figures.add("bucket_kills", done.kills, what)
    figures.add("bucket_torn", len(done.torn), " ".join(done.torn[:1]))
    figures.add("bucket_lost", done.lost)
    figures.add("bucket_twice", done.twice)
    figures.add("bucket_exact", done.exact, "each weight is whole, and the ledger counts each event")
