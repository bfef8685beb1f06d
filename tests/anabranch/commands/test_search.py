"""`anabranch search`: what the learner reports of challengers, and the file by which a person controls them."""

import json
import os
from datetime import timedelta

import pytest

from anabranch import cli
from anabranch.config.loader import load_config
from anabranch.learner.state_dir.search_control import read_control
from anabranch.learner.status.report import ChallengerReport, LearnerReport, SearchReport, write_report

LR = "learner.optimizer.lr"


@pytest.fixture
def config(example):
    path = example / "pipeline.toml"
    with path.open("a") as file:
        file.write(f'\n[search]\npromote = "auto"\nspace = {{"{LR}" = [1e-6, 1.0]}}\n')
    load_config(path, {}).state_dir.mkdir()
    return path


@pytest.fixture
def reported(config):
    ended = ChallengerReport(
        number=7,
        values={LR: 0.02},
        steps=87,
        difference=0.0794,
        log_wealth=7.8,
        log_threshold=7.6,
        outcome="better",
        step=91,
    )
    search = SearchReport(
        values={LR: 0.001},
        given={LR: 0.001},
        pinned=False,
        challengers=[],
        history=[ended],
        outcomes={"better": 1},
        steps=87,
    )
    state_dir = load_config(config, {}).state_dir
    report = LearnerReport(pid=os.getpid(), generation=1, started=0.0, time=1.0, steps=91, search=search)
    write_report(state_dir, report)
    return state_dir


def run(config, *arguments):
    return cli.main(["search", *arguments, "-c", str(config)])


def test_status_shows_what_was_tried_and_how_it_ended(config, reported, capsys):
    assert run(config, "status") == 0
    shown = capsys.readouterr().out
    assert f"{LR} = 0.02" in shown
    assert "better at step 91" in shown
    assert "7.8 of 7.6" in shown
    assert run(config, "status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["history"][0]["number"] == 7


def test_a_challenger_is_promoted_by_its_number(config, reported, capsys):
    assert run(config, "promote", "8", "--yes") == 2
    assert "there is no challenger 8: those that are known are 7..7" in capsys.readouterr().err
    assert run(config, "promote", "7", "--yes") == 0
    assert f"the model is to take {LR} = 0.02" in capsys.readouterr().out
    control = read_control(reported)
    assert (control.values, control.pinned) == ({LR: 0.02}, False)


def test_a_challenger_is_promoted_after_a_pin_that_the_learner_has_not_reported(config, reported):
    assert run(config, "pin") == 0
    assert run(config, "promote", "7", "--yes") == 0
    assert read_control(reported).pinned


def test_a_challenger_with_other_keys_than_the_model_is_refused(config, reported, capsys):
    report = json.loads((reported / "learner.json").read_bytes())
    report["search"]["values"]["learner.max_grad_norm"] = 1.0
    (reported / "learner.json").write_text(json.dumps(report))
    assert run(config, "promote", "7", "--yes") == 2
    assert "change search.space back" in capsys.readouterr().err
    assert read_control(reported).values == {}


class TestNetworks:
    """Challengers with other arguments of the factory, which only another pipeline can take."""

    @pytest.fixture
    def network(self, config, reported):
        text = config.read_text().replace('promote = "auto"', 'promote = "alert"')
        config.write_text(text.replace("[1e-6, 1.0]}", '[1e-6, 1.0], "model.args.hidden" = [16, 256]}'))
        report = json.loads((reported / "learner.json").read_bytes())
        for values, hidden in ((report["search"]["values"], 128), (report["search"]["history"][0]["values"], 203)):
            values["model.args.hidden"] = hidden
        begun = report["search"]["history"][0] | {"number": 8, "steps": 0, "taught": 1200, "outcome": None}
        report["search"]["challengers"] = [begun]
        (reported / "learner.json").write_text(json.dumps(report))
        return reported

    def test_the_learner_has_the_time_that_serving_has_for_a_pass(self, config, network):
        served = load_config(config, {}).pipeline.serving
        assert (served.max_batch, served.slo - served.max_delay) == (64, timedelta(milliseconds=20 - 2))

    def test_promote_says_which_arguments_to_set(self, config, network, capsys):
        assert run(config, "promote", "7", "--yes") == 2
        assert "set hidden = 203 in [model].args of a new pipeline" in capsys.readouterr().err
        assert read_control(network).values == {}

    def test_they_are_not_pinned(self, config, network, capsys):
        assert run(config, "pin", "model.args.hidden=200") == 2
        assert "model.args.hidden is of the network, which a learner keeps" in capsys.readouterr().err

    def test_status_says_how_long_they_were_taught(self, config, network, capsys):
        assert run(config, "status") == 0
        shown = capsys.readouterr().out
        assert "taught for 1,200 steps" in shown
        assert "model.args.hidden = 203" in shown


def test_settings_are_pinned_and_unpinned(config, reported, capsys):
    assert run(config, "pin", f"{LR}=0.003") == 0
    before = read_control(reported)
    assert before.values == {LR: 0.003}
    assert run(config, "pin") == 0
    assert read_control(reported) == before
    assert before.pinned
    assert run(config, "unpin") == 0
    assert not read_control(reported).pinned


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("learner.batch_size=3", "search.space does not have learner.batch_size"),
        (f"{LR}=7", "is no number in the range of search.space, 1e-06..1"),
        (f"{LR}=fast", "is no number in the range"),
        (LR, "= (nothing) is no number"),
    ],
)
def test_a_value_that_cannot_be_pinned_is_refused(config, reported, capsys, value, said):
    assert run(config, "pin", value) == 2
    assert said in capsys.readouterr().err
    assert not read_control(reported).pinned


def test_without_a_report_the_way_out_is_named(config, capsys):
    assert run(config, "status") == 2
    assert "write a section [search], and start the learner" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('space = {"learner.batch_size" = [1, 2]}', "cannot be changed between two steps of one model"),
        ('space = {"learner.optimizer.momentum" = [0.5, 0.9]}', "the optimizer has none"),
        ('space = {"model.args.width" = [8, 64]}', "[model].args has no integer width"),
        ('promote = "auto"\nspace = {"model.args.hidden" = [8, 256]}', 'promote = "auto" does not go with model.args'),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_at_start(example, section, said, capsys):
    path = example / "pipeline.toml"
    with path.open("a") as file:
        file.write(f"\n[search]\n{section}\n")
    assert cli.main(["config", "check", "-c", str(path)]) == 2
    output = capsys.readouterr()
    assert said in output.out + output.err
