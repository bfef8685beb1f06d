"""Each part of the fault harness, in a small form: it finds no fault."""

import os

import pytest

from tests.faults.answer_kills import answered_while_killed
from tests.faults.backfill import killed_while_backfilling
from tests.faults.baselines import MEMORY_BYTES, with_and_without_kills
from tests.faults.bucket_kills import killed_with_its_store
from tests.faults.kills import killed_again_and_again
from tests.faults.outliers import VARIANTS, kinds_of, learn
from tests.faults.overload import KEPT, flooded
from tests.faults.poison import KINDS, train_with_poison
from tests.faults.round_kills import killed_inside_rounds
from tests.faults.serving_kills import asked_while_the_learner_is_killed
from tests.faults.siege import besiege
from tests.faults.undo import undone_while_killed
from tests.support.kafka import START


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_message_has_one_answer_whenever_the_server_is_killed(kafka, tmp_path):
    if kafka.kind == "embedded":
        pytest.skip("the embedded broker is not the one whose transactions count")
    done = answered_while_killed(tmp_path, kafka.bootstrap, kills=10, seed=6)
    assert (done.kills, done.lost, done.twice) == (10, 0, 0)
    assert done.messages > 0
    assert done.running > 0, "no kill came while messages were answered"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_is_trained_once_whenever_the_learner_is_killed(kafka, tmp_path):
    account = killed_again_and_again(
        tmp_path, kafka.bootstrap, events=12_000, kills=2, checkpoint_every="300ms", seed=2
    )
    assert (account.kills, account.lost, account.twice, account.other) == (2, 0, 0, 0)
    assert account.exact
    assert account.early < 2, "no kill came after a step"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_is_trained_once_though_the_learner_is_killed_in_the_middle_of_rounds(kafka, tmp_path):
    found = killed_inside_rounds(tmp_path, kafka.bootstrap, events=6000, kills=2, checkpoint_every="300ms", seed=4)
    assert [0 < taken < steps for taken, steps in found.rounds] == [True] * 2
    assert (found.lost, found.twice) == (0, 0)
    assert found.exact


@pytest.mark.any_broker
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_request_fails_while_the_learner_is_killed(kafka, tmp_path):
    asked = asked_while_the_learner_is_killed(tmp_path, kafka.bootstrap, kills=2, seed=0)
    assert asked.kills == 2
    assert asked.failures == []
    assert asked.requests > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_is_trained_once_when_the_store_and_then_the_host_is_lost(kafka, tmp_path):
    done = killed_with_its_store(tmp_path / "pipeline", kafka.bootstrap, events=6000, kills=2, seed=5)
    assert (done.kills, done.store, done.hosts) == (2, 1, 1)
    assert (done.torn, done.lost, done.twice) == ([], 0, 0)
    assert done.exact


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_event_of_the_history_and_of_the_topic_is_trained_once(kafka, tmp_path):
    done = killed_while_backfilling(tmp_path, kafka.bootstrap, rows=12_000, kills=3, seed=15)
    assert (done.kills, done.lost, done.twice, done.other) == (3, 0, 0, 0)
    assert done.exact
    assert done.before > 0, "no kill came before the switch"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_undone_labels_leave_no_trace_though_the_learner_is_killed(kafka, tmp_path):
    done = undone_while_killed(tmp_path, kafka.bootstrap, events=2000, batch=10, kills=1, seed=3)
    assert done.kills == 1
    assert done.tainted
    assert done.listed == done.failed == done.tainted
    assert (done.differ, done.wrong_answers) == ([], [])
    assert done.tensors > 5
    assert done.answers > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_do_not_change_the_weights_with_replay_from_disk(kafka, tmp_path):
    runs = with_and_without_kills(tmp_path, kafka.bootstrap, events=3200, kills=1, seed=0)
    assert runs.equal
    assert runs.kills == 1
    assert runs.tensors > 10
    assert runs.stored_bytes > 5 * MEMORY_BYTES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("client", "replicas"), [("kafka-python", 1), ("confluent", 1), ("kafka-python", 2)])
def test_each_kind_of_poison_has_its_outcome_and_ends_no_process(kafka, tmp_path, client, replicas):
    outcome = train_with_poison(tmp_path, kafka.bootstrap, client, 400, 2 * len(KINDS), seed=1, replicas=replicas)
    assert (outcome.restarts, outcome.without_outcome, outcome.wrong) == (0, 0, 0), f"{outcome.report} {outcome.said}"


@pytest.mark.any_broker  # Apache Kafka refuses some of the record times by itself
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["late-labels", "tokens", "registered"])
def test_a_learner_names_each_outlier_and_goes_on(kafka, tmp_path, name):
    """The variants that need a second topic, a tokenizer or a registry; `test_single_events.py` has the others."""
    variant = next(each for each in VARIANTS if each.name == name)
    done = learn(tmp_path, kafka.bootstrap, variant, 6000, kinds_of(variant))
    assert (done.unnamed, done.alive, done.restarts, done.unfinished) == ([], [], 0, 0)
    assert done.right > 0.8


@pytest.mark.any_broker
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_attacks_on_http_end_no_part_and_fail_no_request(kafka, tmp_path):
    besieged = besiege(tmp_path, kafka.bootstrap, quiet_seconds=1.0, seconds=3.0)
    assert besieged.ended == ()
    assert besieged.failures == ()
    assert besieged.requests > 0
    assert besieged.memory < 100_000_000
    assert besieged.log_bytes < 500_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_events_that_arrive_too_fast_stay_in_the_broker(kafka, tmp_path):
    all_kept = bool(os.environ.get(START))
    memory = flooded(tmp_path, kafka.bootstrap, seconds=10.0, pause=0.1, kept=None if all_kept else KEPT)
    assert memory.sent > 1.5 * memory.learned
    assert memory.exact
    # It goes up and down by 12 MB; a reader without bounds would hold some 50,000 messages of 0.5 kB and more.
    assert memory.curve[-1] - memory.curve[1] < 30e6
    # Events that a reader without bounds would have read before the broker deletes them.
    assert all_kept or memory.removed > 0
