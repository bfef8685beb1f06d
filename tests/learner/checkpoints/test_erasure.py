"""Erasure in a whole learner: no erased event is left in, or read again from, store, holdout set, files or Kafka."""

import contextlib
import json
import os
import re
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import redis

from anabranch.commands.checkpoints.backup import back_up
from anabranch.commands.erase import erase_events
from anabranch.commands.replay.contents import read_sample, read_stats
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.replay.erasure.erasure_log import ErasureLog
from tests import forkserver
from tests.pipelines import total
from tests.support.waiting import slowness

CONFIG = """
batch_size = 16
stop_timeout = "20s"
[schema.key]
name = "k"
[versions]
publish_every = "100ms"
[gate]
holdout_fraction = 0.1
[checkpoints]
every = "200ms"
"""
DISK = '[replay]\ndevice_bytes = "2kB"\ndisk = {bytes = "1MB"}\n'
SECRET = np.float32(12345.678)
"""A feature that only the events to erase have."""


@pytest.fixture(params=["", DISK], ids=["device", "disk"])
def pipeline(write_pipeline, kafka, make_topic, request):
    """The path of a pipeline's file, and its topic of two partitions."""
    topic = make_topic(partitions=2)
    return write_pipeline(kafka.bootstrap, topic, CONFIG + request.param), topic


def plain(count, key="other"):
    return [{"x": [float(i % 3 == k) for k in range(3)], "y": i % 3, "k": f"{key}-{i % 50}"} for i in range(count)]


def secret(count, key="anna"):
    return [{"x": [float(SECRET)] * 3, "y": i % 3, "k": key} for i in range(count)]


def files_with_the_secret(state_dir):
    """Return the files with the secret; a running learner may rename and delete files meanwhile."""
    pattern, paths = np.array([SECRET, SECRET], np.float32).tobytes(), []
    for folder, _, names in os.walk(state_dir):  # which passes over a folder that has gone
        for path in (Path(folder) / name for name in names):
            with contextlib.suppress(FileNotFoundError):
                if pattern in path.read_bytes():
                    paths.append(str(path))
    return paths


def stored(report):
    return max(report.replay_rows.values())


def erase_now(config, *keys, ranges=()):
    return erase_events(load_config(config, {}), keys, ranges, timedelta(seconds=30 * slowness()))


def settings(config):
    return load_config(config, {})


@pytest.mark.any_broker
def test_events_erased_by_a_running_learner_are_in_no_file_and_are_not_restored(kafka, produce, pipeline, start):
    config, topic = pipeline
    learner = start(config)
    for partition in range(2):
        produce(kafka.bootstrap, topic, [*plain(100), *secret(40), *plain(100)], partition=partition)
    before = learner.wait_for(lambda each: total(each) == 480 and (each.checkpoint or 0) > 0)
    answer = erase_now(config, "anna")
    assert answer.applied
    # Either all events of a key are held out or none.
    assert sorted((answer.store, answer.holdout)) == [0, 80]
    after = learner.wait_for(lambda each: each.erased_through == 1)
    assert stored(after) + after.holdout_rows == stored(before) + before.holdout_rows - 80
    assert files_with_the_secret(learner.state_dir) == []
    learner.kill()

    learner = start(config)
    # Later events of that key are new.
    produce(kafka.bootstrap, topic, [*plain(50), *secret(5)])
    report = learner.wait_for(lambda each: total(each) == 535)
    assert stored(report) + report.holdout_rows == 480 - 80 + 55
    assert report.replay_lost == 0
    assert after.outcomes["trained"] + after.outcomes["held_out"] == 480, "an outcome was changed"


def test_an_erased_event_that_is_read_again_is_skipped(kafka, produce, pipeline, start):
    """A learner that never wrote a checkpoint reads all of Kafka again."""
    config, topic = pipeline
    config.write_text(config.read_text().replace('every = "200ms"', 'every = "1h"'))
    learner = start(config)
    produce(kafka.bootstrap, topic, [*plain(100), *secret(40), *plain(100)])
    learner.wait_for(lambda each: total(each) == 240)
    learner.kill()
    answer = erase_now(config, "anna", ranges=(f"{topic}[0]@10..19",))
    assert (answer.applied, answer.store, answer.holdout) == (True, 0, 0), "no checkpoint has it"
    assert files_with_the_secret(learner.state_dir) == []
    learner = start(config)
    report = learner.wait_for(lambda each: total(each) == 240)
    assert report.skipped == {"erased": 50}
    assert report.outcomes["skipped"] == 50
    assert stored(report) + report.holdout_rows == 190
    learner.stop()
    assert files_with_the_secret(learner.state_dir) == []


@pytest.mark.any_broker
def test_without_a_learner_checkpoints_and_tiers_are_rewritten_at_once(kafka, produce, pipeline, start):
    config, topic = pipeline
    config.write_text(config.read_text().replace("holdout_fraction = 0.1", "holdout_fraction = 0"))
    learner = start(config)
    for round_ in range(3):
        produce(kafka.bootstrap, topic, [*plain(60), *secret(10), *secret(3, key=7)])
        learner.wait_for(lambda each, n=round_: total(each) == 73 * (n + 1))
    learner.stop()
    assert len(files_with_the_secret(learner.state_dir)) > 0
    assert len(list(read_sample(settings(config), 1000, ["key=anna"], None))) == 30
    answer = erase_now(config, "anna", "7")
    assert (answer.applied, answer.store, answer.holdout) == (True, 39, 0)
    assert files_with_the_secret(learner.state_dir) == []
    assert list(read_sample(settings(config), 1000, ["key=anna"], None)) == []
    assert read_stats(settings(config)).events == 180
    again = erase_now(config, "anna")
    assert (again.applied, again.store) == (True, 0)
    learner = start(config)
    report = learner.wait_for(lambda each: each.steps > 0)
    assert (stored(report), report.replay_lost) == (180, 0)


@pytest.mark.any_broker
def test_an_erasure_is_applied_after_a_crash_of_the_learner(kafka, produce, pipeline, start):
    config, topic = pipeline
    learner = start(config)
    produce(kafka.bootstrap, topic, [*plain(100), *secret(40)])
    learner.wait_for(lambda each: total(each) == 140 and (each.checkpoint or 0) > 0)
    learner.process.send_signal(signal.SIGSTOP)
    answer = erase_events(settings(config), ["anna"], [], timedelta(seconds=0))
    assert not answer.applied
    learner.kill()
    learner = start(config)
    report = learner.wait_for(lambda each: total(each) == 140 and each.erased_through == 1)
    assert stored(report) + report.holdout_rows == 100
    assert files_with_the_secret(learner.state_dir) == []
    log = ErasureLog(learner.state_dir / "erasures.log")
    log.refresh()
    assert log.store + log.holdout <= 40
    assert b"anna" not in log.path.read_bytes()


def test_a_tombstone_erases_earlier_events_of_its_key_also_after_a_crash(kafka, produce, pipeline, start):
    config, topic = pipeline
    learner = start(config)
    produce(kafka.bootstrap, topic, [*plain(100), *secret(20), *secret(20, key=17)])
    produce(kafka.bootstrap, topic, secret(10), partition=1)
    learner.wait_for(lambda each: total(each) == 150 and (each.checkpoint or 0) > 0)
    for key in (b"anna", b"17", b"nobody"):
        produce(kafka.bootstrap, topic, [None], key=key)
    produce(kafka.bootstrap, topic, secret(4))
    report = learner.wait_for(lambda each: total(each) == 157 and each.erased == 3)
    assert report.skipped == {"tombstone": 3}
    learner.wait_for(lambda each: stored(each) + each.holdout_rows == 104)
    learner.kill()
    learner = start(config)
    report = learner.wait_for(lambda each: total(each) == 157 and each.erased_through == 3)
    assert stored(report) + report.holdout_rows == 104
    assert report.erased == 3, "a tombstone that was read again is in the log twice"
    log = ErasureLog(learner.state_dir / "erasures.log")
    log.refresh()
    lines = [json.loads(line[9:]) for line in log.path.read_bytes().splitlines()]
    assert [line["by"] for line in lines if line["what"] == "key"] == [
        f"{topic}#0[0]@{offset}" for offset in (140, 141, 142)
    ]
    answer = erase_now(config, "anna")
    assert answer.store + answer.holdout == 4
    assert files_with_the_secret(learner.state_dir) == []


def test_a_tombstone_erases_earlier_events_of_its_batch(kafka, produce, pipeline, start):
    config, topic = pipeline
    produce(kafka.bootstrap, topic, [*secret(5), *plain(3)])
    produce(kafka.bootstrap, topic, [None], key=b"anna")
    produce(kafka.bootstrap, topic, secret(2))
    learner = start(config)
    report = learner.wait_for(lambda each: total(each) == 11)
    assert report.skipped == {"erased": 5, "tombstone": 1}
    assert stored(report) + report.holdout_rows == 5


@pytest.mark.any_broker
@pytest.mark.parametrize("below", ["", "disk = {bytes = '1MB'}\n"], ids=["primary", "cache"])
def test_rows_in_redis_are_removed(kafka, make_topic, produce, write_pipeline, mortal_redis, start, below):
    topic = make_topic()
    tiers = f'[replay]\ndevice_bytes = "2kB"\nredis = {{url = "{mortal_redis.url}", bytes = "2MB"}}\n{below}'
    config = write_pipeline(kafka.bootstrap, topic, CONFIG.replace("fraction = 0.1", "fraction = 0") + tiers)
    learner = start(config)
    produce(kafka.bootstrap, topic, [*plain(60), *secret(20)])
    learner.wait_for(lambda each: total(each) == 80 and (each.checkpoint or 0) > 0)
    learner.wait_for(lambda _: len(secrets_in(mortal_redis)) == 20)
    learner.wait_for(lambda _: read_stats(settings(config)).events == 80)
    assert len(list(read_sample(settings(config), 100, ["key=anna"], None))) == 20
    answer = erase_now(config, "anna")
    assert (answer.applied, answer.store) == (True, 20)
    assert secrets_in(mortal_redis) == []
    produce(kafka.bootstrap, topic, secret(5))
    learner.wait_for(lambda each: total(each) == 85)
    learner.stop()
    answer = erase_now(config, "anna")
    assert (answer.applied, answer.store) == (False, 5)
    assert "rows in replay.redis are removed by the next start" in "".join(answer.sentences())
    assert files_with_the_secret(learner.state_dir) == []
    learner = start(config)
    learner.wait_for(lambda each: each.erased_through == 2)
    assert secrets_in(mortal_redis) == []
    report = learner.wait_for(lambda each: each.steps > 0)
    assert (stored(report), report.replay_lost) == (60, 0)


@pytest.mark.any_broker
def test_rows_in_a_tier_of_the_user_are_removed(kafka, make_topic, produce, write_pipeline, start, tmp_path):
    topic = make_topic()
    tiers = (
        '[replay]\ndevice_bytes = "2kB"\n[replay.tiers.shelf]\n'
        'factory = "tests.support.shelf:ShelfFactory"\nbytes = "100kB"\n'
    )
    config = write_pipeline(kafka.bootstrap, topic, CONFIG.replace("fraction = 0.1", "fraction = 0") + tiers)
    learner = start(config)
    produce(kafka.bootstrap, topic, [*plain(60), *secret(20)])
    learner.wait_for(lambda each: total(each) == 80 and (each.checkpoint or 0) > 0)
    learner.wait_for(lambda _: read_stats(settings(config)).events == 80)
    assert len(list(read_sample(settings(config), 100, ["key=anna"], None))) == 20
    learner.stop()
    assert back_up(settings(config), tmp_path / "backup").elsewhere == ["replay.tiers.shelf"]
    on_shelf = lambda: [path for path in files_with_the_secret(learner.state_dir) if "/shelf/" in path]  # noqa: E731
    assert len(on_shelf()) == 1
    answer = erase_now(config, "anna")
    assert (answer.applied, answer.store) == (False, 20)
    assert "rows in replay.tiers.shelf are removed by the next start" in "".join(answer.sentences())
    assert files_with_the_secret(learner.state_dir) == on_shelf()
    learner = start(config)
    learner.wait_for(lambda each: each.erased_through == 1)
    assert files_with_the_secret(learner.state_dir) == []
    report = learner.wait_for(lambda each: each.steps > 0)
    assert (stored(report), report.replay_lost) == (60, 0)


def secrets_in(server):
    """Return the keys of Redis whose values have the secret."""
    with contextlib.closing(redis.Redis.from_url(server.url)) as client:
        pattern = np.array([SECRET, SECRET], np.float32).tobytes()
        return [key for key in client.scan_iter("anabranch:*") if pattern in (client.get(key) or b"")]


def command(config, *arguments):
    """Run a command as a user does."""
    return forkserver.run(["-m", "anabranch", *arguments, "-c", str(config)])


@pytest.mark.any_broker
def test_the_commands_print_their_results_as_text_and_as_json(kafka, make_topic, produce, write_pipeline, start):
    topic = make_topic()
    config = write_pipeline(kafka.bootstrap, topic, CONFIG.replace("fraction = 0.1", "fraction = 0") + DISK)
    early = command(config, "replay", "stats")
    assert (early.returncode, early.stdout) == (2, "")
    assert early.stderr.startswith("anabranch: there is no checkpoint")
    learner = start(config)
    produce(kafka.bootstrap, topic, [*plain(60), *secret(20)])
    learner.wait_for(lambda each: total(each) == 80)
    learner.stop()

    stats = json.loads(command(config, "replay", "stats", "--json").stdout)
    assert (stats["events"], stats["by_label"]) == (80, {"0": 27, "1": 27, "2": 26})
    shown = command(config, "replay", "stats").stdout
    assert re.search(r"^events +80 of [\d,]+, of 80 that were added$", shown, re.MULTILINE)
    chosen = ("replay", "sample", "3", "--where", "key=anna", "--where", "label=1", "--seed", "5")
    some = command(config, *chosen)
    assert [json.loads(line)["label"] for line in some.stdout.splitlines()] == [1, 1, 1]
    assert some.stdout == command(config, *chosen).stdout

    for arguments, sentence in (
        (("erase",), "name what to erase by --key or --offsets"),
        (("erase", "--offsets", "nonsense"), "is not of the form events[3]@100..200"),
        (("replay", "sample", "--where", "colour=red"), "does not apply"),
    ):
        wrong = command(config, *arguments)
        assert (wrong.returncode, wrong.stdout) == (2, ""), arguments
        assert sentence in " ".join(wrong.stderr.split()), arguments
    done = command(config, "erase", "--key", "anna", "--yes", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["applied"], answer["store"]) == (0, True, 20)
    said = command(config, "erase", "--offsets", f"{topic}[0]@0..9", "--yes")
    assert said.stdout.startswith("erased events: 10 of the store, 0 of the holdout set")
    assert json.loads(command(config, "replay", "stats", "--json").stdout)["events"] == 50
    assert files_with_the_secret(learner.state_dir) == []


@pytest.mark.any_broker
def test_an_invalid_erasure_is_one_sentence(kafka, produce, pipeline, start):
    config, topic = pipeline
    with pytest.raises(SettingsError, match="no learner has read anything"):
        erase_now(config, "anna")
    with pytest.raises(SettingsError, match="nothing was learned"):
        erase_now(config, ranges=("events[0]@1..2",))
    learner = start(config)
    produce(kafka.bootstrap, topic, plain(20))
    learner.wait_for(lambda each: total(each) == 20)
    for text, sentence in (
        ("events@1..2", "is not of the form"),
        (f"{topic}[0]@5..2", "ends before it begins"),
        (f"{topic}[9]@1..2", "is of no partition that was read"),
    ):
        with pytest.raises(SettingsError, match=sentence):
            erase_now(config, ranges=(text,))
    config.write_text(config.read_text().replace('[schema.key]\nname = "k"\n', ""))
    with pytest.raises(SettingsError, match=r"--key needs \[schema.key\]"):
        erase_now(config, "anna")


def test_the_store_can_be_read_while_a_learner_runs(kafka, produce, pipeline, start):
    config, topic = pipeline
    config.write_text(config.read_text().replace("holdout_fraction = 0.1", "holdout_fraction = 0"))
    with pytest.raises(SettingsError, match="there is no checkpoint"):
        read_stats(settings(config))
    learner, begin = start(config), int(time.time())
    produce(kafka.bootstrap, topic, [*plain(90), *secret(10)], timestamp_ms=begin * 1000)
    learner.wait_for(lambda each: total(each) == 100)
    learner.wait_for(lambda each: (each.checkpoint or 0) > 0)
    learner.wait_for(lambda _: read_stats(settings(config)).events == 100)
    stats = read_stats(settings(config))
    assert (stats.events, stats.added, stats.by_label) == (100, 100, {"0": 34, "1": 33, "2": 33})
    assert datetime.fromisoformat(stats.record_times["median"]).timestamp() == begin
    json.dumps(stats.document())
    sample = list(read_sample(settings(config), 1000, ["key=anna", "label=1", "partition=0"], 3))
    assert [each["label"] for each in sample] == [1, 1, 1]
    assert sample[0]["features"] == {"x": [float(SECRET)] * 3}
    assert {each["event"].partition("@")[0] for each in sample} == {f"{topic}#0[0]"}
    five = [list(read_sample(settings(config), 5, [], 3)) for _ in range(2)]
    assert five[0] == five[1]
    assert len({each["event"] for each in five[0]}) == 5
    with pytest.raises(SettingsError, match="is no class"):
        list(read_sample(settings(config), 1, ["label=9"], None))
    with pytest.raises(SettingsError, match="does not apply"):
        list(read_sample(settings(config), 1, ["colour=red"], None))
