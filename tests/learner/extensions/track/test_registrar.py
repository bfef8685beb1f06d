"""Registration in MLflow: each version that served comes once, with its lineage, whatever fails in between."""

import threading
from collections import Counter

import pytest
import torch
from pydantic import ValidationError

from anabranch.learner.extensions.track import extension, registrar
from anabranch.learner.extensions.track.extension import TrackExtension
from anabranch.learner.extensions.track.mlflow_client import MlflowClient
from anabranch.learner.extensions.track.process import Opening, TrackedRun
from anabranch.learner.extensions.track.registrar import NAME, WITHDRAWN, Registrar
from anabranch.learner.settings.track import TrackSettings
from anabranch.learner.stream.trained_through import NewlyTrained
from anabranch.learner.versions.format import RegistryState, Verdict, Versions
from tests.support.manifests import manifest_of

SOURCE = "s3://models/digits/versions/{number}"
ALIAS = ("digits", "served")
RUN = TrackedRun("digits", "generation-3-0a1b2c3d", {}, "")


class Client(MlflowClient):
    """Without the process around it."""

    def close(self):
        """Do nothing."""


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path / "versions")


@pytest.fixture
def publish(versions):
    """Write versions, `publish(1, 2)`, each with the one before as its parent."""

    def write(*numbers, verdict="pass"):
        for number in numbers:
            manifest = manifest_of(
                number,
                generation=3,
                parent=number - 1 or None,
                time=1000.0 + number,
                step=10 * number,
                through={"events:0": 100 * number},
                metrics={"now": 0.5, "class_a b%": 0.25, "average_precision": 0.5},
                measure="average_precision",
                constant={"average_precision": 0.125},
                schema="d" * 64,
                args={"width": 8},
                learned=NewlyTrained(7, [1]),
            )
            judged = Verdict(verdict, ["no worse"], {"old_drop": 0.01})  # type: ignore[arg-type]
            versions.write({"w": torch.full((1,), float(number))}, manifest, judged)

    return write


@pytest.fixture
def counted():
    return Counter()


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def start(versions, mlflow, counted, clock):
    """Make a registrar, as a learner that starts does; the test polls it."""
    versions.path.mkdir()

    def make():
        client = Client(Opening({"kind": "mlflow", "url": mlflow.url}, RUN, "digits", SOURCE))
        registrar = Registrar(client, versions, "digits", count=lambda outcome: counted.update([outcome]))  # type: ignore[arg-type]
        return TrackExtension(client, [registrar], clock)  # type: ignore[arg-type]

    return make


def registrar_of(track) -> Registrar:
    return track._tracked[0]


def waiting(track):
    return registrar_of(track).waiting


def serve(versions, *recent, **changes):
    """Play a server that has served these versions, the last one now."""
    previous = recent[-2] if len(recent) > 1 else None
    state = {"serving": recent[-1], "previous": previous, "recent": [*recent], **changes}
    versions.write_state(RegistryState(**state))


def test_each_version_that_served_is_registered_once_with_its_lineage(
    versions, publish, start, mlflow, counted, capsys
):
    publish(1, 2, 3)
    serve(versions, 1, 3)  # 2 never served
    track = start()
    track.poll()
    track.poll()
    assert [each["source"] for each in mlflow.versions] == [SOURCE.format(number=n) for n in (1, 3)]
    assert (mlflow.models, mlflow.experiments, mlflow.aliases) == (["digits"], ["digits"], {ALIAS: "2"})
    tags = mlflow.tags(1)
    weights = versions.manifest(3).files["model.safetensors"]
    assert len(tags.pop("anabranch.identity")) == len(tags.pop("anabranch.model_sha256")) == 64
    assert tags == {
        "anabranch.pipeline": "digits",
        "anabranch.version": "3",
        "anabranch.generation": "3",
        "anabranch.parent": "2",
        "anabranch.step": "30",
        "anabranch.trained_through": "events:0=300",
        "anabranch.rows": "7",
        "anabranch.schema_sha256": "d" * 64,
        "anabranch.model_factory": "m:build",
        "anabranch.weights_sha256": weights,
        "anabranch.measure": "average_precision",
        "anabranch.verdict": "pass",
        "anabranch.verdict_reasons": "no worse",
    }
    run = mlflow.versions[1]["run_id"]
    own = {"now": 0.5, "class_a b_": 0.25, "average_precision": 0.5}
    assert mlflow.metrics(run) == own | {"constant.average_precision": 0.125, "gate.old_drop": 0.01}
    assert mlflow.runs[run]["info"]["status"] == "FINISHED"
    assert counted == {"registered": 2}
    assert capsys.readouterr().out == ""


def test_a_return_to_an_older_version_moves_the_alias_and_tags_the_other(versions, publish, start, mlflow):
    publish(1, 2, 3)
    serve(versions, 1, 2, 3)
    track = start()
    track.poll()
    versions.write_verdict(3, Verdict("fail", ["monitoring found it worse"]))
    serve(versions, 1, 2, 3, 1, rolled_back=[2], previous=3)
    track.poll()
    start().poll()  # a learner that starts again sends none of it twice
    assert mlflow.aliases == {ALIAS: "1"}
    assert [mlflow.tags(index).get(WITHDRAWN) for index in range(3)] == [
        None,
        "rolled back",
        "monitoring found it worse",
    ]
    assert len(mlflow.versions) == 3
    assert mlflow.requests.count("model-versions/set-tag") == 2


@pytest.mark.parametrize(
    "fault",
    [
        {"away": True},
        {"status": 500},
        {"status": 503},
        {"status": 429, "error": "REQUEST_LIMIT_EXCEEDED"},
        {"status": 403, "error": "PERMISSION_DENIED"},
    ],
)
def test_what_waits_survives_an_outage_and_a_restart(versions, publish, start, mlflow, counted, clock, fault):
    publish(1, 2)
    serve(versions, 1, 2)
    track = start()
    for name, value in fault.items():
        setattr(mlflow, name, value)
    track.poll()
    assert mlflow.url in (track.warning or "")
    for number in (1, 2):
        versions.delete(number)  # pruned meanwhile
    asked = len(mlflow.requests)
    track.poll()
    assert len(mlflow.requests) == asked  # it waits before it tries again
    mlflow.away, mlflow.status = False, None
    track = start()
    assert waiting(track) == 2
    track.poll()
    assert (len(mlflow.versions), mlflow.aliases, track.warning) == (2, {ALIAS: "2"}, None)
    assert counted == {"registered": 2}


@pytest.mark.parametrize("restarts", [False, True])
def test_an_answer_that_is_lost_makes_no_duplicate(versions, publish, start, mlflow, clock, restarts):
    publish(1)
    serve(versions, 1)
    track = start()
    for lost in range(20):  # more than there are requests
        mlflow.lost = len(mlflow.requests) + lost // 3
        if restarts:
            track = start()
        track.poll()
        clock.now += 1000
    mlflow.lost = None
    track.poll()
    assert (len(mlflow.versions), len(mlflow.runs), mlflow.aliases) == (1, 1, {ALIAS: "1"})
    assert mlflow.models == mlflow.experiments == ["digits"]


def test_a_version_that_is_refused_is_left_out_and_the_next_is_registered(versions, publish, start, mlflow, counted):
    publish(1, 2)
    serve(versions, 1, 2)
    mlflow.refuses = {SOURCE.format(number=1)}
    track = start()
    track.poll()
    assert [each["source"] for each in mlflow.versions] == [SOURCE.format(number=2)]
    assert (counted, track.warning, waiting(track)) == ({"refused": 1, "registered": 1}, None, 0)


def test_a_version_that_was_deleted_in_mlflow_blocks_nothing(versions, publish, start, mlflow):
    publish(1, 2, 3)
    serve(versions, 1, 2)
    track = start()
    track.poll()
    mlflow.versions.clear()  # by a person
    serve(versions, 1, 2, 1)
    track.poll()
    assert track.warning is None
    serve(versions, 1, 2, 1, 3)
    track.poll()
    assert [each["source"] for each in mlflow.versions] == [SOURCE.format(number=3)]


def test_what_does_not_fit_or_is_gone_is_counted(versions, publish, start, mlflow, counted, monkeypatch):
    monkeypatch.setattr(registrar, "_MOST_WAITING", 3)
    publish(*range(1, 6))
    serve(versions, 99, *range(1, 6))
    mlflow.away = True
    track = start()
    track.poll()
    assert (waiting(track), counted) == (3, {"queue": 2, "gone": 1})
    mlflow.away = False
    start().poll()
    assert [each["source"] for each in mlflow.versions] == [SOURCE.format(number=n) for n in (3, 4, 5)]
    assert counted == {"queue": 2, "gone": 1, "registered": 3}


def test_versions_that_serve_while_a_slow_registry_answers_are_registered(
    versions, publish, start, mlflow, monkeypatch
):
    publish(*range(1, 9))
    serve(versions, 1, 2)
    track = start()
    registry = registrar_of(track)._registry
    register, still = registry.register, [(2, 3, 4), (5, 6, 7)]

    def slowly(version):
        if still:
            serve(versions, *still.pop(0))  # those before are not in the file any more, as after a hundred versions
        return register(version)

    monkeypatch.setattr(registry, "register", slowly)
    track.poll()
    assert (len(mlflow.versions), waiting(track)) == (2, 5)
    track.poll()
    assert [each["source"] for each in mlflow.versions] == [SOURCE.format(number=n) for n in range(1, 8)]
    assert mlflow.aliases == {ALIAS: "7"}


def test_without_its_file_it_finds_what_is_registered(versions, publish, start, mlflow):
    publish(1)
    serve(versions, 1)
    start().poll()
    (versions.path.parent / NAME).write_bytes(b'{"waiting": [')
    start().poll()
    assert len(mlflow.versions) == len(mlflow.runs) == 1


def test_versions_of_servers_on_other_hosts_are_registered(versions, publish, start, mlflow):
    publish(1, 2)
    track = start()
    registrar_of(track)._served_by_all = lambda own: RegistryState(serving=2, recent=[1, 2])
    track.poll()
    assert (len(mlflow.versions), mlflow.aliases) == (2, {ALIAS: "2"})


def test_a_learner_that_returns_to_its_host_moves_the_alias_back(versions, publish, start, mlflow):
    publish(1, 2)
    serve(versions, 1, 2)
    start().poll()
    mlflow.aliases[ALIAS] = "1"  # by the learner of another host, meanwhile
    start().poll()
    assert (mlflow.aliases, len(mlflow.versions)) == ({ALIAS: "2"}, 2)


def test_the_end_does_not_wait_for_a_server_that_hangs(versions, publish, start, mlflow, monkeypatch):
    monkeypatch.setattr(extension, "_LONGEST_END", extension._LONGEST_END / 100)
    publish(1)
    serve(versions, 1)
    mlflow.go_on = threading.Event()
    track = start()
    track.thread.start()
    mlflow.asked.wait()
    track.close()
    assert track.thread.alive  # a daemon: the process ends
    mlflow.go_on.set()
    track.thread._thread.join()
    assert waiting(start()) + len(mlflow.versions) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kind": "mlflow", "url": "http://m", "source": "s3://models"}, "where the number of the version belongs"),
        ({"kind": "mlflow", "url": "http://m", "alias": "v1"}, "alias"),
        ({"kind": "mlflow"}, "needs the address of its server"),
        ({"kind": "tensorboard", "url": "http://t"}, 'url: kind = "tensorboard" has no use for it'),
        ({"kind": "tensorboard", "project": "ours"}, 'project: kind = "tensorboard" has no use for it'),
        ({"kind": "wandb", "alias": "served"}, 'alias: kind = "wandb" has no use for it'),
        ({"kind": "comet"}, "kind"),
    ],
)
def test_settings_say_what_is_wrong(settings, sentence):
    with pytest.raises(ValidationError, match=sentence):
        TrackSettings(**settings)


@pytest.mark.parametrize("url", ["http://ada:s3cret@m:5000", "http://m/?write_token=s3cret"])
def test_settings_with_credentials_are_refused_without_them_in_the_sentence(url):
    with pytest.raises(ValidationError, match="MLFLOW_TRACKING_USERNAME") as refused:
        TrackSettings(kind="mlflow", url=url)
    assert isinstance(refused.value.errors()[0]["input"], dict)  # so that the sentence has no value
