"""A learner with a history: files, then the topic, every row once, though it is killed."""

import json
import os
import time
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.commands.erase import erase_events
from anabranch.commands.replay.contents import read_sample
from anabranch.config.loader import load_config
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.hold_out import held_out
from anabranch.learner.settings.learner import GateSettings
from tests import forkserver
from tests.pipelines import adds_up, encoded, events, total

STREAM = """
[stream.backfill]
files = ["*.parquet", "*.jsonl"]
{more}
"""
CONFIG = """
batch_size = 16
[versions]
publish_every = "200ms"
[checkpoints]
every = "200ms"
[gate]
holdout_fraction = 0.1
"""
SLOW = """
import time
from pathlib import Path
from torch import nn
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.1 if (Path(__file__).parent / "brake").exists() else 0.002)
        return super().forward(x)
def build():
    return Slow(3, 3)
"""
FILES, ROWS = 3, 2000


def write_files(folder, rows=ROWS):
    """Write two Parquet files and one of JSON lines, whose rows are a year old."""
    for number in range(2):
        columns = {name: [each[name] for each in events(rows)] for name in ("x", "y")}
        columns["at"] = [time.time() - 3.2e7 + n for n in range(rows)]
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=300)
    lines = [json.dumps({**each, "at": 1.0}) + "\n" for each in events(rows)]
    (folder / "2.jsonl").write_text("".join(lines))


def held_out_by_key(keys, state_dir):
    """Return which rows with these keys are held out by the secret of a state directory."""
    secret = StreamSecret.read(state_dir)
    assert secret is not None
    hashes, none = hash_texts([key.encode() for key in keys]).astype(np.uint64), np.zeros(len(keys), np.uint64)
    columns = {"offset": none, "row": none, "key_hash": hashes, "group_hash": none}
    return held_out(GateSettings(holdout_fraction=0.1).hold_out(secret), columns, none).tolist()


def done(report, rows):
    return total(report) == rows and not any(each.pending for each in report.partitions.values())


@pytest.mark.slow
@pytest.mark.parametrize("sigkill", ["learner", "no"])
def test_every_row_is_learned_from_once_though_the_learner_is_killed(
    kafka, make_topic, produce, write_pipeline, start, tmp_path, sigkill
):
    topic = make_topic()
    write_files(tmp_path)
    produce(kafka.bootstrap, topic, encoded(events(300)))
    config = write_pipeline(kafka.bootstrap, topic, CONFIG, SLOW, stream=STREAM.format(more=""))
    learner = start(config)
    rows = FILES * ROWS + 300
    if sigkill == "learner":
        # In each file, near the switch, and in the topic.
        for seen in (500, 2500, 4500, FILES * ROWS - 50, FILES * ROWS + 20):
            learner.wait_for(lambda report, seen=seen: total(report) >= seen)
            learner.kill()
            learner = start(config)
    during = learner.wait_for(lambda report: total(report) > 0)
    assert during.lag_seconds < 600
    report = learner.wait_for(lambda report: done(report, rows))
    assert adds_up(report)
    assert {name: (part.files, part.start, part.end, part.finished) for name, part in report.partitions.items()} == {
        "history": (FILES, 0, FILES * ROWS, FILES * ROWS),
        f"{topic}:0": (0, 0, 300, 300),
    }
    assert report.replay_rows["device"] == report.outcomes["trained"]
    assert report.outcomes["trained"] + report.outcomes["held_out"] == rows
    assert report.lag_seconds < 600


@pytest.mark.slow
def test_a_history_is_read_several_times_and_stored_once(kafka, make_topic, write_pipeline, start, tmp_path):
    topic = make_topic()
    write_files(tmp_path, 500)
    stream = STREAM.format(more='epochs = 3\ntime = "at"\nshuffle = 64')
    config = write_pipeline(kafka.bootstrap, topic, CONFIG, stream=stream)
    learner = start(config)
    learner.wait_for(lambda report: total(report) > 2000)
    learner.kill()
    learner = start(config)
    report = learner.wait_for(lambda report: done(report, 3 * FILES * 500))
    assert adds_up(report)
    kept = report.partitions["history"].outcomes["held_out"]
    assert 80 < kept < 230
    assert report.outcomes["held_out"] == kept
    assert report.outcomes["trained"] == 3 * (FILES * 500 - kept)
    assert report.skipped == {"repeated": 2 * kept}
    assert report.replay_rows["device"] == FILES * 500 - kept
    assert report.holdout_rows == kept
    assert learner.stop() == 0
    # How old rows of files are says nothing of how fresh versions are.
    manifests = [json.loads(path.read_text()) for path in (learner.state_dir / "versions").glob("*/manifest.json")]
    assert manifests
    assert {name for each in manifests for name in each["trained_through"]} == {f"{topic}:0"}
    assert [each for each in manifests if each.get("learned") and each["learned"]["rows"]] == []


@pytest.mark.slow
def test_an_erasure_covers_rows_that_are_not_read_yet_in_all_passes(kafka, make_topic, write_pipeline, start, tmp_path):
    topic = make_topic()
    rows = [{**each, "k": "anna" if n % 100 == 7 else f"other-{n}"} for n, each in enumerate(events(1500))]
    table = {name: [each[name] for each in rows] for name in ("x", "y", "k")}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    keyed = CONFIG + '[schema.key]\nname = "k"\n'
    config = write_pipeline(kafka.bootstrap, topic, keyed, SLOW, stream=STREAM.format(more="epochs = 2"))
    (tmp_path / "brake").touch()
    learner = start(config)
    learner.wait_for(lambda report: total(report) > 300 and report.checkpoint)
    answer = erase_events(load_config(config, {}), ["anna"], ("history[1]@10..19",), timedelta(seconds=30))
    assert answer.applied
    applied = learner.wait_for(lambda report: report.erased_through == 2)
    (tmp_path / "brake").unlink()
    report = learner.wait_for(lambda report: done(report, 6000))
    assert adds_up(report)
    assert learner.stop() == 0
    left = list(read_sample(load_config(config, {}), 10_000, [], None))
    anna = f"{int(hash_texts([b'anna'])[0]):016x}"
    assert len(left) > 2000
    assert [event for event in left if event["key_hash"] == anna] == []
    assert not {event["event"] for event in left} & {f"history#0[1]@{offset}" for offset in range(10, 20)}
    again = held_out_by_key([each["k"] for each in rows], learner.state_dir)  # skipped as repeated in the second pass
    erased = [n for n in range(6000) if n % 100 == 7 or (n // 1500 % 2 and 10 <= n % 1500 < 20)]
    erased = [n for n in erased if n < 3000 or not again[n % 1500]]
    after = sum(n >= total(applied) for n in erased)
    assert 0 < after <= report.skipped["erased"] < len(erased)


@pytest.mark.slow
def test_deletes_in_a_history_erase_what_they_follow_and_nothing_later(
    kafka, make_topic, write_pipeline, start, tmp_path
):
    rows = [{**each, "k": "anna" if n in (7, 250, 450) else f"other-{n}"} for n, each in enumerate(events(500))]
    changes = [{"op": "c", "before": None, "after": row} for row in rows]
    changes.insert(300, {"op": "d", "before": {"k": "anna"}, "after": None})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in changes))
    stream = 'envelope = "debezium"\n[stream.backfill]\nfiles = ["a.jsonl"]\nepochs = 2\n'
    keyed = CONFIG.replace("holdout_fraction = 0.1", "holdout_fraction = 0") + '[schema.key]\nname = "k"\n'
    config = write_pipeline(kafka.bootstrap, make_topic(), keyed, stream=stream)
    learner = start(config)
    report = learner.wait_for(lambda report: done(report, 2 * len(changes)))
    assert adds_up(report)
    assert (report.outcomes["dead_lettered"], report.skipped["tombstone"], report.skipped["deleted"]) == (0, 1, 1)
    assert learner.stop() == 0
    left = list(read_sample(load_config(config, {}), 10_000, [], None))
    anna = f"{int(hash_texts([b'anna'])[0]):016x}"
    assert {event["event"] for event in left if event["key_hash"] == anna} == {"history#0[0]@451"}
    assert len({event["event"] for event in left}) == 498


@pytest.mark.slow
def test_the_history_may_be_removed_once_it_is_read_also_from_a_deterministic_stream(
    kafka, make_topic, produce, write_pipeline, start, tmp_path
):
    topic = make_topic()
    write_files(tmp_path)
    stream = STREAM.format(more="")
    deterministic = "deterministic = true\n" + CONFIG
    config = write_pipeline(kafka.bootstrap, topic, deterministic, SLOW, stream=stream)
    (tmp_path / "brake").touch()
    learner = start(config)
    learner.wait_for(lambda report: total(report) > 100 and report.checkpoint)
    assert learner.stop() == 0
    (tmp_path / "brake").unlink()
    with_history = config.read_text()
    without = with_history.replace(stream, "")
    assert without != with_history
    config.write_text(without)
    done_with = forkserver.run(["-m", "anabranch.learner", "-c", str(config)], env=os.environ)
    assert done_with.returncode == 2
    said = done_with.stderr.strip().splitlines()[-1]
    assert f"of {FILES} files of the history that are not read to their end, and there is no [stream.backfill]" in said
    config.write_text(with_history)
    learner = start(config)
    produce(kafka.bootstrap, topic, encoded(events(160)))
    learner.wait_for(lambda report: total(report) > FILES * ROWS)
    assert learner.stop() == 0
    config.write_text(without)
    learner = start(config)
    produce(kafka.bootstrap, topic, encoded(events(160)))
    report = learner.wait_for(lambda report: total(report) > FILES * ROWS + 250)
    assert adds_up(report)
    assert report.partitions["history"].pending == 0
    assert {*report.partitions} == {"history", f"{topic}:0"}
    assert learner.stop() == 0
