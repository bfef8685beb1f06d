"""`anabranch status`: what learner and serving last said, and whether they still live."""

import contextlib
import io
import json
import os
import time
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

import anabranch.serving.reporting.report
from anabranch import cli
from anabranch.command import output
from anabranch.commands.status import read_status, render
from anabranch.config.loader import load_config
from anabranch.core.start_report import StartReport, start_does, starting
from anabranch.learner.device.reading import DeviceReport
from anabranch.learner.status import report as reports
from anabranch.learner.status.report import (
    BackfillReport,
    DeviceHealthReport,
    DeviceSharingReport,
    InputReport,
    LabelReport,
    LearnerReport,
    LiveReport,
    PartitionReport,
    ServedReport,
    StorageReport,
)
from anabranch.runtime.console import PlainConsole
from anabranch.runtime.lifecycle import Exit
from anabranch.serving.reporting.report import AnswersReport, ServingReport, write_report

PARTITION = PartitionReport(
    start=0, end=1000, finished=958, passed=0, gaps=0, removed=0, pending=42, trained_through=957
)


@pytest.fixture
def config(example):
    config = load_config(example / "pipeline.toml", {})
    config.state_dir.mkdir()
    return config


@pytest.fixture
def now(monkeypatch):
    """The time by the clock of the command, always the same."""
    now = time.time()
    monkeypatch.setattr("anabranch.commands.status.time", SimpleNamespace(time=lambda: now))
    return now


@pytest.fixture
def dead_pid():
    return 2**30  # Linux has at most 2^22 processes


def learner_report(**changes):
    report = LearnerReport(
        pid=os.getpid(),
        generation=3,
        started=time.time() - 100,
        time=time.time(),
        steps=1234,
        problems=["the Kafka broker does not answer"],
        outcomes={"trained": 900, "held_out": 50, "dead_lettered": 8},
        partitions={"events:0": PARTITION},
        accuracy={"now": 0.875, "worst": 0.5, "old": 0.75},
        loss={"now": 0.25, "overall": 0.5},
        forgetting=0.125,
        drifts=2,
        drift_step=1200,
        replay_ratio=1.5,
        rates={"steps": 9.5, "rows_new": 600.0, "rows_replay": 601.0},
        replay_rows={"device": 900},
        replay_bytes={"device": 2_500_000},
        holdout_rows=50,
        checkpoint=4,
        checkpoint_time=time.time() - 90,
        version=17,
        versions_published=17,
    )
    return msgspec.structs.replace(report, **changes)


def serving_report(**changes):
    report = ServingReport(
        pid=os.getpid(),
        started=time.time() - 100,
        time=time.time(),
        address="http://127.0.0.1:8000",
        ready=True,
        version=16,
        trained_through="events:0=950",
        swaps={"swapped": 15, "refused": 1},
        refused={15: "version 15: its model.safetensors does not have its digest"},
        freshness_p50_seconds=0.31,
        freshness_p99_seconds=0.842,
        requests={"200": 321},
        request_p50_seconds=0.0012,
        request_p99_seconds=0.0098,
    )
    return msgspec.structs.replace(report, **changes)


def screen(config):
    console = Console(width=120, file=io.StringIO())
    console.print(render(read_status(config)))
    return " ".join(console.file.getvalue().split())


def test_answers_through_kafka_are_on_the_screen(config):
    stream = AnswersReport(
        topics=["payments"],
        output="payments.scores",
        partitions=2,
        messages={"answered": 1234, "dead_lettered": 3},
        per_second=56.0,
        lag=7,
        p50_seconds=0.012,
        p99_seconds=0.034,
    )
    write_report(config.state_dir, serving_report(stream=stream))
    said = screen(config)
    assert "stream payments -> payments.scores: answered 1,234, dead-lettered 3" in said
    assert "56 a second, lag 7, p50 12.0 ms, p99 34.0 ms from append to answer" in said


def test_device_sharing_is_on_the_screen(config):
    share = DeviceSharingReport(
        policy="fraction",
        servers=1,
        training=0.75,
        times=9,
        yielded_seconds=1.5,
        wait_p99_seconds=0.0034,
        micro_batch_size=32,
    )
    reports.write_report(config.state_dir, learner_report(device_sharing=share))
    assert "device sharing fraction: 75% training, 1 server, p99 3.4 ms to yield, micro-batches of 32" in screen(config)


def backfill_report(**changes):
    report = BackfillReport(
        topics=["history", "history.2"],
        rows_read=4_300_000,
        rows=10_000_000,
        files_read=4,
        files=12,
        file="year=2026/part-0004.parquet",
        rate=812_345.6,
        seconds_left=430.2,
    )
    return msgspec.structs.replace(report, **changes)


@pytest.mark.parametrize("columns", [80, None])
def test_the_history_is_shown_with_its_expected_end_at_80_columns_and_without_a_terminal(config, columns):
    partitions = {
        name: msgspec.structs.replace(PARTITION, files=12, history=number)
        for number, name in enumerate(("history", "history.2"), 1)
    }
    reports.write_report(
        config.state_dir,
        learner_report(backfill=backfill_report(), partitions=partitions | {"events:0": PARTITION}),
    )
    terminal = {} if columns is None else {"width": columns, "force_terminal": True, "color_system": None}
    console = PlainConsole(file=io.StringIO(), **terminal)
    console.print(render(read_status(config)))
    shown = console.file.getvalue()
    first, second, third = (line.split() for line in shown.partition("\nhistory")[2].splitlines()[:3])
    bar, *rest = first
    assert set(bar) == {"\N{BOX DRAWINGS HEAVY HORIZONTAL}"}
    assert len(bar) == 17, "43 % of 40 columns"
    assert rest == ["43.0%,", "0:07:10", "left"]
    assert second == ["4,300,000", "of", "10,000,000", "rows,", "812,346/s"]
    assert third == ["file", "5", "of", "12:", "year=2026/part-0004.parquet"]
    assert "events:0" in shown
    assert [line for line in shown.splitlines() if line.startswith("history.2")] == []
    assert len([line for line in shown.splitlines() if line.startswith("history")]) == 1


def test_a_history_that_is_read_is_one_line(config):
    done = backfill_report(rows_read=10_000_000, files_read=12, done=True)
    reports.write_report(config.state_dir, learner_report(backfill=done))
    assert "history read, 10,000,000 rows of 12 files steps" in screen(config)


def test_what_the_object_store_lacks_is_on_the_screen(config):
    lags = {"checkpoints": 0.0, "versions": 125.0}
    storage = StorageReport(url="s3://b/p", lag_seconds=lags, uploaded_bytes=2_000_000, failures=4)
    reports.write_report(config.state_dir, learner_report(storage=storage))
    assert "object store s3://b/p lacks the newest versions for 0:02:05" in screen(config)
    storage = msgspec.structs.replace(storage, lag_seconds=dict.fromkeys(lags, 0.0))
    reports.write_report(config.state_dir, learner_report(storage=storage))
    assert "object store s3://b/p has everything, 2 MB uploaded" in screen(config)


def test_late_labels_are_on_the_screen(config):
    labels = LabelReport(
        waiting=1500,
        ready=0,
        kept=3,
        bytes=150_000,
        bound=10**9,
        ended={"trained": 40, "timed_out": 2, "skipped": 0},
        labels={"matched": 40, "late": 1, "duplicate": 0},
        lag_p50_seconds=5.0,
        lag_p99_seconds=7200.0,
    )
    waiting = msgspec.structs.replace(PARTITION, waiting=1500)
    reports.write_report(config.state_dir, learner_report(labels=labels, partitions={"events:0": waiting}))
    text = screen(config)
    assert "1,500 events wait (150 kB of 1 GB); ended: trained 40, timed out 2; labels: matched 40, late 1" in text
    assert "lag p50 5.00 s, p99 2:00:00" in text
    assert "trained through 957, 1,500 wait for labels" in text


def test_what_each_version_has_answered_is_on_the_screen(config):
    measured = {"value": {"log_loss": 0.4, "roc_auc": 0.8}, "lower": {"log_loss": 0.3, "roc_auc": 0.7}}
    measured["upper"] = {"log_loss": 0.5, "roc_auc": 0.9}
    served = {"7": ServedReport(rows=1200, **measured), "all": ServedReport(rows=1300)}
    counts = {"matched": 1300, "late": 2, "duplicate": 0}
    live = LiveReport(served=served, answers=counts, waiting=40, part=0.25)
    reports.write_report(config.state_dir, learner_report(live=live, measure="roc_auc"))
    text = screen(config)
    assert "matched 1,300, late 2; 40 events and answers wait; 25.00% of the events are joined" in text
    assert "version 7: roc_auc 0.8 (0.7 to 0.9), log_loss 0.4 (0.3 to 0.5) (1,200 labels)" in text
    assert "all: not measured yet (1,300 labels)" in text


def test_the_device_is_on_the_screen_with_its_gravest_sentence(config):
    device = DeviceReport(
        uuid="GPU-1",
        name="NVIDIA H100",
        temperatures={"gpu": 71.0},
        memory_used=12_300_000_000,
        memory_total=80_000_000_000,
        power=512.3,
        warnings=["it slows down because it is hot"],
    )
    health = DeviceHealthReport(devices=[device], joules_per_event=0.125)
    reports.write_report(config.state_dir, learner_report(device=health))
    line = "device NVIDIA H100, 71 °C, 12.3 of 80.0 GB, 512 W, 0.125 J an event: it slows down because it is hot"
    assert line in screen(config)


def test_what_a_report_says_gives_no_orders_to_the_terminal(config, capsys):
    problem = ["\x1b]0;owned\x07 a title", "\x1b[2J a clear screen", "\x9b2J", "[/red] :smile:", "plain"]
    reports.write_report(config.state_dir, learner_report(problems=problem))
    output(None, lambda: render(read_status(config)))
    shown = capsys.readouterr().out
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}
    for sentence in (
        "\N{REPLACEMENT CHARACTER}]0;owned",
        "\N{REPLACEMENT CHARACTER}[2J a clear screen",
        "[/red] :smile:",
        "plain",
    ):
        assert sentence in shown


def test_inputs_with_the_largest_psi_are_shown(config):
    inputs = InputReport(psi={"fee": 0.02, "amount": 0.314, "country": 0.1, "age": 0.01}, drifted=["amount"])
    reports.write_report(config.state_dir, learner_report(inputs=inputs))
    assert "inputs 1 drift; the largest PSI: amount 0.31, country 0.10, fee 0.02" in screen(config)


def test_a_warning_is_shown_and_is_no_problem(config):
    warning = "the teacher at http://models:8000 cannot be reached"
    reports.write_report(config.state_dir, learner_report(problems=[], warnings=[warning]))
    skew = "request feature amount has drifted: PSI 0.31 against events of training"
    anabranch.serving.reporting.report.write_report(config.state_dir, serving_report(problems=[], warnings=[skew]))
    assert f"warning: {warning}" in screen(config)
    assert f"warning: {skew}" in screen(config)
    assert read_status(config).exit_code() == Exit.DONE


def test_nothing_that_runs_is_said_so(config):
    assert "learner not running serving not running" in screen(config)
    document = json.loads(read_status(config).to_json())
    assert document["learner"] == {"condition": "not running", "age_seconds": None, "report": None}


@pytest.mark.parametrize(
    ("written", "asked", "shown"),
    [
        (0.1, 0.5, "lag 42 offsets, 1.50 s, as of 0."),
        (1, 65.5, "lag not known; 0:01:06 ago it was 42 offsets, 1.50 s"),
        (65, 1.5, "lag not known; 0:01:06 ago it was 42 offsets, 1.50 s"),
        (0.1, None, "lag not known yet"),
    ],
)
def test_lag_is_shown_with_its_age_and_old_lag_is_not_shown_as_current(config, now, written, asked, shown):
    report = learner_report(time=now - written, lag_seconds=1.5, lag_age_seconds=asked)
    reports.write_report(config.state_dir, report)
    assert shown in screen(config)


def test_the_screen_has_every_figure(config, now):
    reports.write_report(config.state_dir, learner_report(time=now, checkpoint_time=now - 90))
    anabranch.serving.reporting.report.write_report(config.state_dir, serving_report())
    text = screen(config)
    for figure in (
        f"learner running pid {os.getpid()}",
        "the Kafka broker does not answer",
        "steps 1,234 (9.5/s)",
        "600.0/s new, 601.0/s replayed, ratio 1.5",
        "loss now 0.25, overall 0.5",
        "forgetting 12.5%",
        "drifts 2, the last at step 1,200",
        "now 87.5%, worst 50.0%, old 75.0%",
        "trained 900, held out 50, dead lettered 8",
        "events:0 lag 42, trained through 957",
        "replay device 900 (2.5 MB)",
        "version 17, 17 published, 0 skipped",
        "address http://127.0.0.1:8000",
        "version 16",
        "learned events:0=950",
        "checkpoint 4, made 0:01:30 ago",
        "freshness p50 0.31 s, p99 0.84 s",
        "swaps swapped 15, refused 1",
        "refused 15: version 15: its model.safetensors does not have its digest",
        "requests 200 321",
        "p50 1.2 ms, p99 9.8 ms",
    ):
        assert figure in text


def test_old_events_caches_and_lost_events_have_their_names(config):
    rows = {"device": 50, "disk": 700}
    report = learner_report(replay_rows=rows, replay_bytes={"device": 50_000, "disk": 700_000}, replay_lost=3)
    reports.write_report(config.state_dir, report)
    anabranch.serving.reporting.report.write_report(config.state_dir, serving_report(freshness_p99_seconds=7 * 86400.0))
    text = screen(config)
    assert "replay device cache 50 (50 kB), disk 700 (700 kB) 3 events were lost by a tier" in text
    assert "freshness p50 0.31 s, p99 7 days, 0:00:00 from append" in text


def test_a_hold_and_a_pin_are_shown(config, now):
    report = learner_report(
        time=now, held_since=now - 75, held_reasons=["worse on old", "worse on new"], verdict="fail"
    )
    reports.write_report(config.state_dir, report)
    anabranch.serving.reporting.report.write_report(config.state_dir, serving_report(pinned=16))
    text = screen(config)
    assert "gate versions are held back, for 0:01:15: worse on old; worse on new" in text
    assert "version 16, pinned" in text
    reports.write_report(config.state_dir, learner_report(verdict="pass"))
    assert "gate pass" in screen(config)


def test_the_last_words_of_a_dead_part_are_shown_as_such(config, dead_pid, now):
    reports.write_report(config.state_dir, learner_report(pid=dead_pid, time=now - 3600))
    assert f"learner not running pid {dead_pid}, last report 1:00:00 ago" in screen(config)


@pytest.mark.parametrize("before", [None, 2**30, os.getpid()], ids=["first", "after another", "with its pid"])
def test_a_part_that_starts_says_since_when_and_what_it_waits_for(config, now, before):
    if before is not None:
        reports.write_report(config.state_dir, learner_report(pid=before, time=now - 3600))
    with starting(config.state_dir, "learner"):
        start_does("waits for localhost:9092")
        status = read_status(config)
        assert f"learner starting pid {os.getpid()}, for 0.0 s: waits for localhost:9092" in screen(config)
        assert status.exit_code() == Exit.NOT_RUNNING
        document = json.loads(status.to_json())["learner"]
        assert document["condition"] == "starting"
        assert document["start"]["doing"] == "waits for localhost:9092"
        reports.write_report(config.state_dir, learner_report(time=now + 1))
        assert f"learner running pid {os.getpid()}" in screen(config)
    start_does("waits for nobody")
    assert not list(config.state_dir.glob("*-start.json"))


def test_a_part_that_died_while_it_started_is_not_running_whoever_has_its_pid(config):
    path = config.state_dir / "learner-start.json"
    path.write_bytes(msgspec.json.encode(StartReport(os.getpid(), time.time(), "builds the model")))
    assert "learner not running" in screen(config)


def test_the_end_of_a_part_leaves_the_start_of_the_next_one(config):
    before, after = (starting(config.state_dir, "learner") for _ in range(2))
    with contextlib.ExitStack() as ends:
        before.__enter__()
        ends.enter_context(after)
        before.__exit__(None, None, None)
        assert "learner starting" in screen(config)
    assert not list(config.state_dir.glob("*-start.json"))


def test_a_living_part_that_says_nothing_is_silent(config):
    anabranch.serving.reporting.report.write_report(config.state_dir, serving_report(time=time.time() - 25))
    assert "serving silent" in screen(config)


def test_json_holds_both_reports_whole(config):
    report = learner_report()
    reports.write_report(config.state_dir, report)
    document = json.loads(read_status(config).to_json())
    assert document["learner"]["report"] == msgspec.to_builtins(report)
    assert (document["name"], document["learner"]["condition"]) == ("digits", "running")
    assert document["serving"]["report"] is None


def test_a_report_that_has_only_begun_says_what_is_not_known_yet(config):
    now = time.time()
    reports.write_report(config.state_dir, LearnerReport(pid=os.getpid(), generation=1, started=now, time=now, steps=0))
    text = screen(config)
    for figure in ("accuracy not known yet", "outcomes none", "replay empty", "version none yet"):
        assert figure in text


def test_the_exit_code_says_whether_the_pipeline_is_healthy(config, dead_pid, capsys):
    def code(*options):
        return cli.main(["status", "--exit-code", *options, "-c", str(config.path)])

    assert code() == 5, "neither part has run"
    reports.write_report(config.state_dir, learner_report(problems=[]))
    assert code("--json") == 5, "serving has not run"
    anabranch.serving.reporting.report.write_report(config.state_dir, serving_report(problems=[]))
    assert code() == 0
    reports.write_report(config.state_dir, learner_report())
    assert code() == 4, "the learner reports a problem"
    assert cli.main(["status", "-c", str(config.path)]) == 0
    reports.write_report(config.state_dir, learner_report(problems=[], time=time.time() - 100))
    assert code() == 4, "the learner is silent"
    reports.write_report(config.state_dir, learner_report(problems=[], pid=dead_pid))
    assert code() == 5


def test_an_accuracy_has_next_to_it_what_has_to_be_beaten_in_words(config, now):
    constant = reports.BaselineReport(
        rule="always answering 0",
        scores={"now": 0.994, "old": 0.9945},
        comparison="better than always answering 0 by 0.5 points",
    )
    last = reports.BaselineReport(rule="the last label", scores={"now": 0.988})
    baselines = {"constant": constant, "last_label": last}
    report = learner_report(accuracy={"now": 0.999, "old": 0.992}, baselines=baselines)
    reports.write_report(config.state_dir, report)
    shown = screen(config)
    assert (
        "baselines always answering 0: now 99.4%, old 99.5%; now the model is better than always answering 0 by 0.5 "
        "points; it is no better in old the last label: now 98.8%"
    ) in shown
    mean = reports.BaselineReport(rule="always answering the mean", scores={"now": 1.0, "overall": 1.5})
    report = learner_report(accuracy={}, error={"now": 0.5, "overall": 2.0}, baselines={"constant": mean})
    reports.write_report(config.state_dir, report)
    shown = screen(config)
    assert "baselines always answering the mean: now 1, overall 1.5; it is no better in overall" in shown


def test_the_worst_slices_are_shown_and_those_that_are_not_compared_are_named(config, now):
    slices = {
        "country = DE": reports.SliceReport(
            rows=400, accuracy=0.9, constant=0.8, compared=True, drop=-0.01, upper=0.002
        ),
        "country = FR": reports.SliceReport(
            rows=60,
            accuracy=0.95,
            constant=0.99,
            compared=True,
            drop=0.1,
            upper=0.15,
            worse=True,
            measures={"average_precision": 0.25},
        ),
        "country = CH": reports.SliceReport(rows=12, accuracy=0.5, constant=0.75),
        "country = LI": reports.SliceReport(rows=2, accuracy=0.0, constant=1.0),
        "amount: quarter 1": reports.SliceReport(rows=500, values="up to 9.5", accuracy=0.99, compared=True),
    }
    report = learner_report(slices=slices)
    reports.write_report(config.state_dir, report)
    shown = screen(config)
    assert (
        "worst slices country = FR 95.0% of 60 events, one answer has 99.0%, average_precision 0.25, worse than the "
        "served version by 0.1000 (at most 0.1500 worse) country = CH 50.0% of 12 events, one answer has 75.0%, not "
        "compared"
    ) in shown
    assert "amount: quarter 1 (up to 9.5) 99.0% of 500 events" in shown
    assert "better than the served version by 0.0100 (at most 0.0020 worse)" in shown
    assert "2 slices with too few events to compare: country = CH, country = LI" in shown
    assert report.slice_scores["country = LI"] == 0.0
    regression = reports.SliceReport(rows=60, error=2.5, constant=3.0)
    assert regression.words() == "2.5 of 60 events, one answer has 3, not compared"


def test_a_measure_and_the_sentence_of_the_dashboard_are_on_the_screen(config, now):
    measure = reports.MeasureReport(
        value={"now": 0.003, "held_out": 0.004},
        lower={"now": 0.001, "held_out": 0.002},
        upper={"now": 0.005, "held_out": 0.009},
        constant={"now": 0.006, "held_out": 0.008},
    )
    report = learner_report(
        time=now,
        problems=[],
        outcomes={"trained": 5000},
        measure="average_precision",
        measure_reason="0.6% of the newest held-out labels are class 1",
        measures={"average_precision": measure},
        lag_seconds=439.0,
    )
    reports.write_report(config.state_dir, report)
    assert "health" not in screen(config), "serving has not reported"
    write_report(config.state_dir, serving_report(time=now, freshness_p50_seconds=1.0))
    shown = screen(config)
    assert (
        "health What is served is 7 minutes behind the stream. By average precision the model is no better than one "
        "answer for all events."
    ) in shown
    assert "judged by average_precision: 0.6% of the newest held-out labels are class 1" in shown
    assert (
        "average_precision: now 0.003 (0.001 to 0.005; constant 0.006), held out 0.004 (0.002 to 0.009; constant 0.008)"
    ) in shown
