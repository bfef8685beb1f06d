"""The learner as a process: what it learns, how it ends, and how it fails."""

import json
import os
import random
import shutil
import urllib.error
import urllib.request

import pytest
import torch
from prometheus_client.utils import floatToGoString
from safetensors.torch import load_file

from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.state_dir.lock import GENERATION, LOCK, lock_state_directory
from anabranch.learner.status.report import read_report
from anabranch.learner.versions.format import Versions
from tests import forkserver
from tests.pipelines import LINEAR, adds_up, events, total
from tests.support.waiting import PATIENCE_SECONDS, wait_until

CONFIG = """
batch_size = 16
stop_timeout = "20s"
[versions]
publish_every = "100ms"
[gate]
holdout_fraction = 0.1
"""
SLOW = """
import time
from pathlib import Path
from torch import nn
class Brake(nn.Identity):
    def forward(self, x):
        time.sleep(0.1 * (Path(__file__).parent / "brake").exists())
        return x
def build():
    return nn.Sequential(
        Brake(), nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(),
        nn.Linear(32, 3)
    )
"""
OVERFLOWING = """
from torch import nn
class Overflowing(nn.Linear):
    def forward(self, x):
        return super().forward(x * 100)
def build():
    return Overflowing(3, 3)
"""


@pytest.fixture
def pipeline(write_pipeline):
    """Writes a pipeline and returns the path of its config."""

    def write(bootstrap, topic, extra="", model=LINEAR):
        return write_pipeline(bootstrap, topic, CONFIG + extra, model)

    return write


def ended(config, **environment):
    """Run a learner that ends by itself; return its exit code and what it said."""
    done = forkserver.run(["-m", "anabranch.learner", "-c", str(config)], env={**os.environ, **environment})
    return done.returncode, done.stderr.strip().splitlines()[-1]


def read_log(learner, times):
    """Wait for a first report, and return what all processes so far said; `times` of them went on from a checkpoint."""
    learner.wait_for(lambda _: True)
    said = learner.log.read_text()
    assert said.count("going on from checkpoint") == times, said
    return said


def at_rest(learner, events):
    """Wait until that many events have an outcome, and a checkpoint has the last step, after which twenty were due."""
    checkpoints = Checkpoints(learner.state_dir / "checkpoints", "", 0)

    def has_all(report):
        return report.checkpoint is not None and checkpoints.manifest(report.checkpoint).step == report.steps

    since = learner.wait_for(lambda each: total(each) == events and has_all(each))
    while (now := learner.wait_for(lambda _: True)).checkpoint != since.checkpoint or now.time < since.time + 1:
        since = since if now.checkpoint == since.checkpoint else now
    return now


def test_a_stream_is_learned_accounted_for_and_published(kafka, make_topic, produce, pipeline, start):
    topic = make_topic(partitions=2)
    config = pipeline(kafka.bootstrap, topic)
    learner = start(
        config,
        ANABRANCH__LEARNER__OPTIMIZER='{name = "sgd", lr = 0.5}',
        ANABRANCH__LEARNER__PROFILE="{start = 2, steps = 3}",
    )
    for partition in range(2):
        produce(kafka.bootstrap, topic, [*events(600), b"bad", {"x": [1, 2, 3]}], partition=partition)
    report = learner.wait_for(lambda each: total(each) == 1204)
    assert adds_up(report)
    assert report.outcomes["dead_lettered"] == 2
    assert report.outcomes["skipped"] == 2
    assert report.skipped == {"unlabelled": 2}
    assert report.outcomes["held_out"] == report.holdout_rows > 60
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 1200
    assert report.replay_rows == {"device": report.outcomes["trained"]}
    assert report.accuracy["now"] > 0.9
    assert report.partitions[f"{topic}:0"].trained_through == 601

    metrics = learner.get("/metrics")
    trained = [line for line in metrics.splitlines() if 'outcome="trained"' in line and "_total" in line]
    assert sum(float(line.split()[-1]) for line in trained) == report.outcomes["trained"]
    for figure in (
        f'anabranch_replay_rows{{tier="device"}} {float(report.replay_rows["device"])}',
        f'anabranch_replay_bound_bytes{{tier="device"}} {floatToGoString(report.replay_bounds["device"])}',
        f"anabranch_holdout_rows {float(report.holdout_rows)}",
        'anabranch_ingest_skipped_rows{reason="unlabelled"} 2.0',
        f'anabranch_learner_trained_through_offset{{partition="0",topic="{topic}"}} 601.0',
        "anabranch_learner_problems 0.0",
    ):
        assert figure in metrics
    assert json.loads(learner.get("/healthz")) == {"ok": True, "problems": []}

    (trace,) = (learner.state_dir / "traces").iterdir()  # of whole rounds
    begun, ended = (int(number) for number in trace.stem.split("-")[1:])
    assert 2 <= begun <= ended - 3
    assert learner.stop() == 0
    versions = Versions(learner.state_dir / "versions")
    newest = versions.manifest(versions.numbers()[-1])
    assert {name: trained.offset for name, trained in newest.trained_through.items()} == {
        f"{topic}:0": 601,
        f"{topic}:1": 601,
    }
    versions.weights(newest)


def test_each_start_of_a_learner_is_a_run_of_curves(kafka, make_topic, produce, pipeline, start):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic, '[track]\nkind = "tensorboard"\nevery = "100ms"\n')
    for generation in (1, 2):
        learner = start(config)
        produce(kafka.bootstrap, topic, events(300))
        report = learner.wait_for(lambda each, expected=300 * generation: total(each) == expected)

        def has_them(learner=learner, generation=generation, report=report):
            for run in (learner.state_dir / "track").glob(f"generation-{generation}-*"):
                found = accumulator.EventAccumulator(str(run)).Reload()
                if "loss/now" in found.Tags()["scalars"]:
                    return found.Scalars("loss/now")[-1].step >= report.steps
            return False

        wait_until(has_them, "the curve")
        assert learner.stop() == 0
        assert "track" not in learner.log.read_text()  # no thread ended, and no tracker was away
    assert len(list((learner.state_dir / "track").iterdir())) == 2


def test_a_learner_learns_while_mlflow_is_away_and_sends_its_curves_later(
    kafka, make_topic, produce, pipeline, start, mlflow
):
    pytest.importorskip("mlflow")
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic, f'[track]\nkind = "mlflow"\nurl = "{mlflow.url}"\nevery = "100ms"\n')
    sentence = f"curves cannot be sent to {mlflow.url}: "
    mlflow.away = True
    learner = start(config)
    produce(kafka.bootstrap, topic, events(300))
    learner.wait_for(lambda each: total(each) == 300 and sentence in "".join(each.warnings))
    mlflow.away = False
    learner.wait_for(lambda each: sentence not in "".join(each.warnings))
    (run,) = mlflow.runs.values()
    assert "loss/now" in {each["key"] for each in run["metrics"]}
    assert learner.stop() == 0


def test_a_lone_event_that_is_not_trained_on_is_covered_by_a_version_soon(kafka, make_topic, produce, pipeline, start):
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)
    learner = start(config, ANABRANCH__GATE__HOLDOUT_FRACTION="0")
    produce(kafka.bootstrap, topic, events(32))
    learner.wait_for(lambda each: total(each) == 32)
    assert learner.stop() == 0
    learner = start(config, ANABRANCH__GATE__HOLDOUT_FRACTION="0.999999")
    versions = Versions(learner.state_dir / "versions")
    bad, unlabelled, held_out = b"bad", {"x": [1, 2, 3]}, {"x": [1, 0, 0], "y": 0}
    for offset, event in enumerate((bad, unlabelled, held_out), start=32):
        produce(kafka.bootstrap, topic, [event])
        report = learner.wait_for(lambda each, n=offset: total(each) == n + 1 and (each.version or 0) > 0)
        learner.wait_for(
            lambda _, n=offset: versions.manifest(versions.numbers()[-1]).trained_through[f"{topic}:0"].offset == n
        )
    assert report.outcomes["trained"] == 32


def test_a_step_that_is_not_finite_is_skipped_with_its_offsets(kafka, make_topic, produce, pipeline, start):
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic, model=OVERFLOWING)
    learner = start(config, ANABRANCH__GATE__HOLDOUT_FRACTION="0")
    produce(kafka.bootstrap, topic, events(16))
    learner.wait_for(lambda each: total(each) == 16)
    produce(kafka.bootstrap, topic, [{"x": [3e38, 3e38, -3e38], "y": 0}])
    learner.wait_for(lambda each: total(each) == 17)
    produce(kafka.bootstrap, topic, events(16))
    report = learner.wait_for(lambda each: total(each) == 33)
    assert report.skipped == {"non_finite": 1}
    assert report.replay_rows == {"device": 32}
    assert f"skipped {topic}[0]@16..16" in learner.log.read_text()


@pytest.mark.timeout(600)
def test_a_deterministic_run_that_was_killed_and_stopped_ends_with_the_same_weights_bit_for_bit(
    kafka, make_topic, produce, pipeline, start
):
    """Over a topic that was filled beforehand, with partitions of unlike length, of which some end early."""
    topic = make_topic(partitions=3)
    config = pipeline(kafka.bootstrap, topic, model=SLOW)
    dice = random.Random(0)
    for partition, count in enumerate((1300, 500, 200)):
        values = [{"x": [dice.gauss(0, 1) for _ in range(3)], "y": dice.randrange(3)} for _ in range(count)]
        produce(kafka.bootstrap, topic, values, partition=partition)
    environment = {
        "ANABRANCH__LEARNER__DETERMINISTIC": "true",
        "ANABRANCH__CHECKPOINTS__EVERY": "250ms",
        "ANABRANCH__REPLAY__CAPACITY": "500",
        "ANABRANCH__GATE__HOLDOUT_FRACTION": "0",
    }
    steps, brake = 2000 // 16, config.parent / "brake"
    learner = start(config, **environment)
    learner.wait_for(lambda each: each.steps == steps, patience=200)
    assert learner.stop() == 0
    whole = learner.state_dir.rename(learner.state_dir.parent / "whole")
    brake.touch()
    for kill in (True, False):
        learner = start(config, **environment)
        report = learner.wait_for(lambda each: each.steps_since_start > 20 and (each.checkpoint or 0) > 1)
        assert report.steps < steps, "it is over before it is interrupted"
        if kill:
            learner.kill()
        else:
            assert learner.stop() == 0
    brake.unlink()
    learner = start(config, **environment)
    read_log(learner, 2)
    report = learner.wait_for(lambda each: each.steps == steps, patience=200)
    assert report.steps_since_start < steps
    assert learner.stop() == 0
    for part in ("model", "optimizer"):
        mine, others = (
            load_file(
                max((path / "checkpoints").iterdir(), key=lambda checkpoint: int(checkpoint.name))
                / "rank-0"
                / f"{part}.safetensors"
            )
            for path in (learner.state_dir, whole)
        )
        assert mine.keys() == others.keys() != set()
        assert all(torch.equal(value, others[name]) for name, value in mine.items()), part


def test_after_kill_9_it_goes_on_from_the_checkpoint_and_everything_adds_up(
    kafka, make_topic, produce, pipeline, start
):
    topic = make_topic(partitions=2)
    config = pipeline(kafka.bootstrap, topic)
    produced = 0
    environment = {
        "ANABRANCH__CHECKPOINTS__EVERY": "200ms",
        "ANABRANCH__REPLAY__DISK__BYTES": "1MB",
        "ANABRANCH__REPLAY__DEVICE_BYTES": "10kB",
    }
    learner = start(config, **environment)
    for round_ in range(1, 5):
        for partition in range(2):
            produce(kafka.bootstrap, topic, [*events(150), b"bad"], partition=partition)
        produced += 302
        report = learner.wait_for(lambda each, n=produced: total(each) >= n // 2 and (each.checkpoint or 0) > 1)
        assert adds_up(report)
        learner.kill()
        learner = start(config, **environment)
        assert "going on from checkpoint" in read_log(learner, round_)
    report = learner.wait_for(lambda each: total(each) == produced)
    assert adds_up(report)
    assert report.outcomes["dead_lettered"] == 8
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 1200
    assert report.replay_rows["disk"] == report.outcomes["trained"], "an event is in the store twice, or not at all"
    assert report.replay_lost == 0
    assert report.holdout_rows == report.outcomes["held_out"]


def test_sigterm_writes_a_checkpoint_so_that_no_event_comes_twice(kafka, make_topic, produce, pipeline, start):
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)
    learner = start(config)
    produce(kafka.bootstrap, topic, events(300))
    learner.wait_for(lambda each: total(each) > 0)
    assert learner.stop() == 0
    before = read_report(learner.state_dir)
    learner = start(config)
    report = learner.wait_for(lambda each: total(each) == 300)
    assert before is not None
    assert before.checkpoint is not None
    manifest = json.loads((learner.state_dir / "checkpoints" / str(before.checkpoint) / "manifest.json").read_bytes())
    assert before.checkpoint_time == manifest["time"]
    assert report.steps == before.steps + report.steps_since_start
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 300
    assert adds_up(report)


@pytest.mark.any_broker
def test_a_learner_that_rests_makes_no_checkpoints_and_is_well(kafka, make_topic, produce, pipeline, start):
    topic = make_topic()
    learner = start(pipeline(kafka.bootstrap, topic, '[checkpoints]\nevery = "50ms"\n'))

    produce(kafka.bootstrap, topic, events(100))
    before = at_rest(learner, 100)
    assert before.problems == []
    produce(kafka.bootstrap, topic, events(100))
    learner.wait_for(lambda each: (each.checkpoint or 0) > (before.checkpoint or 0))
    report = at_rest(learner, 200)
    assert learner.stop() == 0
    after = read_report(learner.state_dir)
    assert after is not None
    assert after.checkpoint == report.checkpoint, "a learner that had nothing new made a last checkpoint"


@pytest.mark.any_broker
def test_it_ends_with_its_supervisor(kafka, make_topic, pipeline, start):
    learner = start(pipeline(kafka.bootstrap, make_topic()))
    learner.wait_for(lambda _: True)
    assert learner.process.stdin is not None
    learner.process.stdin.close()
    assert learner.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
def test_a_topic_that_was_created_again_ends_it_with_2_or_is_read_from_its_beginning_as_on_gap_says(
    kafka, make_topic, recreate_topic, produce, pipeline, start
):
    """First as a stopped learner finds it, then while one reads."""
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)

    produce(kafka.bootstrap, topic, events(100))
    learner = start(config)
    learner.wait_for(lambda each: total(each) == 100)
    assert learner.stop() == 0
    recreate_topic(kafka.bootstrap, topic)
    produce(kafka.bootstrap, topic, events(60))
    code, sentence = ended(config)
    assert (code, "deleted and created again" in sentence) == (2, True), sentence
    learner = start(config, ANABRANCH__STREAM__ON_GAP="earliest")
    learner.wait_for(lambda each: total(each) == 160)
    recreate_topic(kafka.bootstrap, topic)
    produce(kafka.bootstrap, topic, events(30))
    report = learner.wait_for(lambda each: total(each) == 190)
    assert adds_up(report)
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 190
    assert sorted(part.finished for part in report.partitions.values()) == [30, 60, 100]
    assert learner.stop() == 0


def test_a_second_learner_on_the_same_state_directory_ends_with_2(kafka, make_topic, pipeline):
    config = pipeline(kafka.bootstrap, make_topic())
    impatient = f"lock._UNTIL_MARKED = timedelta(); sys.argv[1:] = ['-c', {str(config)!r}]"
    program = (
        "import runpy, sys; from datetime import timedelta; from anabranch.learner.state_dir import lock; "
        f"{impatient}; runpy.run_module('anabranch.learner', run_name='__main__', alter_sys=True)"
    )
    with lock_state_directory(config.parent / "var"):
        done = forkserver.run(["-c", program])
    assert (done.returncode, "another learner is at work" in done.stderr) == (2, True)


@pytest.mark.any_broker
def test_a_learner_goes_on_after_what_is_there_of_versions_and_checkpoints_where_the_file_of_generations_was_lost(
    kafka, make_topic, produce, pipeline, start
):
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)
    for turn in range(1, 4):
        learner = start(config)
        produce(kafka.bootstrap, topic, events(50))
        learner.wait_for(lambda each, n=50 * turn: total(each) == n)
        assert learner.stop() == 0
        versions = Versions(learner.state_dir / "versions")
        checkpoints = Checkpoints(learner.state_dir / "checkpoints", "", 0)
        assert [
            versions.generation(),
            checkpoints.generation(),
            checkpoints.manifest(max(checkpoints.numbers())).generation,
        ] == [turn] * 3
        assert versions.stale(versions.numbers()) == set()
        (learner.state_dir / GENERATION).unlink()
        if turn == 2:
            shutil.rmtree(learner.state_dir / "versions")


@pytest.mark.any_broker
def test_a_learner_that_lost_its_lock_ends_with_2_when_another_has_come_and_writes_nothing_more(
    kafka, make_topic, produce, pipeline, start
):
    topic = make_topic()
    learner = start(pipeline(kafka.bootstrap, topic, '[checkpoints]\nevery = "50ms"\n'))
    produce(kafka.bootstrap, topic, events(100))
    at_rest(learner, 100)  # a checkpoint that has begun is finished
    (learner.state_dir / LOCK).unlink()  # as a network file system may lose it
    with lock_state_directory(learner.state_dir) as generation:
        assert generation == 2
        before = sorted((learner.state_dir / "checkpoints").iterdir())
        produce(kafka.bootstrap, topic, events(100))
        assert learner.process.wait(PATIENCE_SECONDS) == 2
        assert sorted((learner.state_dir / "checkpoints").iterdir()) == before
    assert "another learner has taken" in learner.log.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("extra", "model", "sentence"),
    [
        ("[nonsense]\n", LINEAR, "unknown key nonsense"),
        ("", "from torch import nn\ndef build():\n    return nn.Linear(3, 4)\n", "needs floats of shape [3, 3]"),
    ],
    ids=["settings", "model"],
)
@pytest.mark.process
def test_what_is_wrong_before_the_first_step_ends_with_2_and_one_sentence(pipeline, extra, model, sentence):
    code, said = ended(pipeline("127.0.0.1:1", "t", extra, model))
    assert code == 2
    assert sentence in said


def test_a_missing_topic_ends_with_3(kafka, pipeline):
    code, said = ended(pipeline(kafka.bootstrap, "no-such-topic"))
    assert (code, 'topic "no-such-topic" does not exist' in said) == (3, True)


@pytest.mark.any_broker
def test_a_taken_status_address_ends_with_2(kafka, make_topic, pipeline, start):
    config = pipeline(kafka.bootstrap, make_topic())
    start(config).wait_for(lambda _: True)
    code, said = ended(config, ANABRANCH__STATE_DIR="other")
    assert code == 2
    assert "learner.status" in said


def test_metrics_require_the_token_where_there_is_one(kafka, make_topic, pipeline, start):
    config = pipeline(kafka.bootstrap, make_topic())
    learner = start(config, ANABRANCH__SERVING__TOKENS__READ="secret")
    learner.wait_for(lambda _: True)
    with pytest.raises(urllib.error.HTTPError) as caught:
        learner.get("/metrics")
    with caught.value as refused:
        assert refused.code == 401
    request = urllib.request.Request(f"http://{learner.status}/metrics", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request) as reply:
        assert reply.status == 200


@pytest.mark.any_broker
@pytest.mark.parametrize("disk", [True, False], ids=["above a disk", "as the last tier"])
def test_training_goes_on_whatever_becomes_of_redis(kafka, make_topic, produce, pipeline, start, mortal_redis, disk):
    topic = make_topic()
    extra = f'[replay]\ndevice_bytes = 0\nredis = {{url = "{mortal_redis.url}", bytes = "20MB"}}\n'
    learner = start(pipeline(kafka.bootstrap, topic, extra + ('disk = {bytes = "20MB"}\n' if disk else "")))
    sent = 0

    def learn(more=200):
        nonlocal sent
        produce(kafka.bootstrap, topic, events(more))
        sent += more
        return learner.wait_for(lambda each: total(each) == sent)

    def redis_is_unhealthy(report):
        return any("replay.redis" in sentence for sentence in report.problems)

    def healed():
        return learner.wait_for(lambda report: not redis_is_unhealthy(report))

    assert learn().replay_lost == 0
    mortal_redis.stop()
    learn()
    learner.wait_for(redis_is_unhealthy)
    mortal_redis.start()
    healed()
    learn()
    mortal_redis.pause(1500)
    learn()
    healed()
    mortal_redis.bound(mortal_redis.used_bytes, "noeviction")
    learn()
    learner.wait_for(redis_is_unhealthy)
    mortal_redis.bound(0, "noeviction")
    report = learn(400)
    healed()
    assert report.outcomes["trained"] + report.outcomes["held_out"] == sent
    assert report.replay_rows["disk" if disk else "redis"] + report.replay_lost == report.outcomes["trained"]
    assert (report.replay_lost == 0) == disk
    assert learner.stop() == 0


@pytest.mark.any_broker
@pytest.mark.parametrize(
    "policies", ['sampling = "similar"', 'sampling = "diverse"\nadmission = "diverse"'], ids=["similar", "diverse"]
)
def test_events_are_compared_where_the_model_puts_them(kafka, make_topic, produce, pipeline, start, policies):
    topic = make_topic()
    model = (
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))\n"
    )
    config = pipeline(kafka.bootstrap, topic, f"[replay]\n{policies}\n", model)
    learner = start(config, ANABRANCH__MODEL__EMBEDDING="1")
    produce(kafka.bootstrap, topic, events(800))
    learner.wait_for(lambda each: total(each) == 800)
    # Not all: the index declines what it has no time for.
    learner.until(lambda: learner.metric("replay_index_rows") > 0)
    assert learner.stop() == 0
    resumed = start(config, ANABRANCH__MODEL__EMBEDDING="1")
    produce(kafka.bootstrap, topic, events(100))
    resumed.wait_for(lambda each: total(each) == 900)
    assert not resumed.wait_for(lambda _: True).problems
    assert resumed.stop() == 0
    assert ended(config)[1].startswith("anabranch: replay.")


@pytest.mark.any_broker
def test_events_of_several_classes_are_learned_stored_and_gone_on_with(kafka, make_topic, produce, pipeline, start):
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)
    environment = {
        "ANABRANCH__SCHEMA__LABEL__CLASSES": '["red", "green", "blue"]',
        "ANABRANCH__SCHEMA__LABEL__MULTI": "true",
        "ANABRANCH__MODEL__TASK": "multilabel",
        "ANABRANCH__LEARNER__STRATEGY": "der++",
        "ANABRANCH__LEARNER__OPTIMIZER": '{name = "sgd", lr = 0.5}',
        "ANABRANCH__STREAM__UNLABELLED": "store",
    }
    lists = [[], ["red"], ["green", "blue"], ["blue", "red", "green"]]
    values = [{"x": [float(name in each) for name in ("red", "green", "blue")], "y": each} for each in lists] * 150
    learner = start(config, **environment)
    unlabelled = [{"x": [1.0, 0.0, 0.0]}] * 20
    produce(kafka.bootstrap, topic, [*values, *unlabelled, {"x": [1.0, 0.0, 0.0], "y": ["red", "red"]}])
    report = learner.wait_for(lambda each: total(each) == 621)
    assert adds_up(report)
    assert (report.outcomes["stored_only"], report.outcomes["dead_lettered"]) == (20, 1)
    assert learner.stop() == 0
    resumed = start(config, **environment)
    produce(kafka.bootstrap, topic, values * 3)
    report = resumed.wait_for(lambda each: total(each) == 621 + 1800)
    assert report.accuracy["now"] > 0.9
    resumed.wait_for(lambda each: each.classes.keys() == {"red", "green", "blue"})
    assert resumed.stop() == 0
    shown = forkserver.run(
        ["-m", "anabranch", "replay", "sample", "9", "-c", str(config)], env={**os.environ, **environment}
    )
    assert shown.returncode == 0, shown.stderr
    for line in shown.stdout.splitlines():
        event = json.loads(line)
        classes = [name for name, value in zip(("red", "green", "blue"), event["features"]["x"], strict=True) if value]
        assert event["label"] in (classes, None)


@pytest.mark.any_broker
def test_a_class_at_each_position_is_learned_stored_and_gone_on_with(kafka, make_topic, produce, pipeline, start):
    """Lists are of any length, and have null; some are no labels."""
    topic = make_topic()
    model = LINEAR.replace("nn.Linear(3, 3)", "nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3)))")
    config = pipeline(kafka.bootstrap, topic, model=model)
    environment = {
        "ANABRANCH__SCHEMA__LABEL__LENGTH": "2",
        "ANABRANCH__MODEL__TASK": "token-classification",
        "ANABRANCH__LEARNER__OPTIMIZER": '{name = "sgd", lr = 0.5}',
    }
    cells = [[0, 1], [1, None], [2, 2, 0]]
    values = [{**event, "y": cells[event["y"]]} for event in events(600)]
    bad = [{"x": [1, 0, 0], "y": y} for y in ([3], [0.5], [[0]], ["0"], [-1], [10**30], 0, {"0": 1}, [True, 0])]
    unlabelled = [{"x": [1, 0, 0], "y": y} for y in ([], [None, None, 1], None)]
    learner = start(config, **environment)
    produce(kafka.bootstrap, topic, [*values, *bad, *unlabelled])
    report = learner.wait_for(lambda each: total(each) == 612)
    assert adds_up(report)
    assert (report.outcomes["dead_lettered"], report.skipped) == (9, {"unlabelled": 3})
    assert report.replay_rows == {"device": report.outcomes["trained"]}
    assert learner.stop() == 0
    resumed = start(config, **environment)
    produce(kafka.bootstrap, topic, values)
    report = resumed.wait_for(lambda each: total(each) == 1212 and each.classes.keys() == {"0", "1", "2"})
    assert report.accuracy["now"] > 0.9
    assert resumed.stop() == 0


@pytest.mark.any_broker
def test_the_output_of_the_model_is_kept_with_each_event_for_der(kafka, make_topic, produce, pipeline, start):
    """Also of a checkpoint that is gone on from, but not under a strategy that keeps none."""
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)
    environment = {"ANABRANCH__LEARNER__STRATEGY": "der++", "ANABRANCH__STREAM__UNLABELLED": "store"}
    learner = start(config, **environment)
    produce(kafka.bootstrap, topic, [*events(300), *({"x": [0.0, 0.0, 1.0]} for _ in range(100))])
    learner.wait_for(lambda each: total(each) == 400)
    assert learner.stop() == 0
    resumed = start(config, **environment)
    produce(kafka.bootstrap, topic, events(200))
    report = resumed.wait_for(lambda each: total(each) == 600)
    assert (report.outcomes["stored_only"], report.problems) == (100, [])
    assert resumed.stop() == 0
    shown = forkserver.run(
        ["-m", "anabranch", "replay", "sample", "5", "-c", str(config)], env={**os.environ, **environment}
    )
    assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 5), shown.stderr
    code, sentence = ended(config)
    assert (code, 'learner.strategy = "er" requires no output of the model with each stored event' in sentence) == (
        2,
        True,
    )
