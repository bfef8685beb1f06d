"""`anabranch versions`: what is listed, what is refused and why, and that torch is not needed for it."""

import hashlib
import io
import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from rich.console import Console

from anabranch import cli
from anabranch.command import output, say
from anabranch.commands.versions.ls import list_versions, render_list
from anabranch.commands.versions.show import render_one, show_version
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.status.report import LearnerReport, LiveReport, ServedReport, write_report
from anabranch.learner.versions.format import RegistryState, Verdict, Versions
from tests.support.manifests import manifest_of


@pytest.fixture
def config(example):
    return load_config(example / "pipeline.toml", {})


@pytest.fixture
def publish(config):
    """Publishes a version: `publish(7, verdict="fail", schema="other")`."""
    versions = Versions(config.state_dir / "versions")

    def write(number, verdict="pass", reasons=(), schema=None, args=None, weights=None, base=None, **changes):
        manifest = manifest_of(
            number,
            generation=2,
            parent=number - 1,
            time=1_700_000_000.0 + number,
            step=number * 100,
            through={"events:0": number * 10},
            **({"metrics": {"now": 0.875, "old": 0.8}, "measure": "accuracy", "constant": {"old": 0.25}} | changes),
            schema=schema or Schema(config.pipeline.events).digest,
            factory="my_model:build",
            args={"hidden": 128} if args is None else args,
            base=base,
        )
        versions.write(
            weights or {"w": torch.zeros(100_000)}, manifest, Verdict(verdict, list(reasons), {"drop_new": 0.25})
        )
        return versions

    return write


def screen(renderable):
    console = Console(file=io.StringIO(), width=220)
    console.print(renderable)
    return console.file.getvalue()


def test_what_a_verdict_and_a_manifest_say_gives_no_orders_to_the_terminal(config, publish, capsys):
    publish(1, "fail", ["\x1b]0;owned\x07 a title", "\x1b[2J a clear screen"], args={"\x1b[2J": "[/red]"})
    output(None, lambda: render_one(show_version(config, 1)))
    output(None, lambda: render_list(list_versions(config, None)))
    say(f"version 1: {list_versions(config, None)[0].refused}")
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    for sentence in ("\N{REPLACEMENT CHARACTER}]0;owned", "\N{REPLACEMENT CHARACTER}[2J a clear screen", "[/red]"):
        assert sentence in shown


def test_a_version_has_what_it_has_answered(config, publish, capsys):
    publish(7)
    served = ServedReport(rows=1200, value={"roc_auc": 0.8}, lower={"roc_auc": 0.7}, upper={"roc_auc": 0.9})
    live = LiveReport(served={"7": served})
    write_report(config.state_dir, LearnerReport(pid=1, generation=1, started=0, time=0, steps=1, live=live))
    assert cli.main(["versions", "show", "7", "-c", str(config.path)]) == 0
    assert "roc_auc 0.8 (0.7 to 0.9) (1,200 labels)" in capsys.readouterr().out
    assert cli.main(["versions", "show", "7", "--json", "-c", str(config.path)]) == 0
    assert json.loads(capsys.readouterr().out)["served"]["rows"] == 1200


class TestLs:
    def test_the_newest_comes_first_with_its_facts(self, config, publish):
        publish(9)
        publish(10, "fail", ["worse on old events"])
        newest, older = list_versions(config, None)
        assert (newest.number, newest.verdict.verdict, newest.manifest.parent) == (10, "fail", 9)
        assert (older.number, older.refused) == (9, None)
        assert older.bytes > 400_000
        line = screen(render_list([older])).splitlines()[1]
        for fact in (
            "9",
            "2023-11-14 22:13:29Z",
            "900",
            "pass",
            "8",
            "events:0=90",
            "401 kB",
            "accuracy 0.8, constant 0.25",
        ):
            assert fact in line

    def test_at_80_columns_each_version_is_one_line(self, config, publish):
        windows = {"now": 0.875, "average_precision": 0.03444} | {f"class {number}": 0.5 for number in range(10)}
        constant = {"average_precision": 0.00613}
        for number in range(4711, 4714):
            publish(number, "inconclusive", metrics=windows, measure="average_precision", constant=constant)
        console = Console(file=io.StringIO(), width=80)
        console.print(render_list(list_versions(config, None)))
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) == 5
        assert "average_precision" in lines[0]
        assert "(constant)" in lines[1]
        for fact in ("4713", "2023-11-14 23:31:53Z", "471,300", "inconclusive", "0.0344 (0.00613)"):
            assert fact in lines[2]

    def test_piped_each_version_is_one_line(self, config, publish, capsys):
        for number in range(1, 4):
            publish(number)
        assert cli.main(["versions", "ls", "--limit", "2", "-c", str(config.path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["version", "3", "2"]
        assert "events:0=30" in lines[1]

    def test_a_limit_leaves_the_newest(self, config, publish):
        for number in range(1, 6):
            publish(number)
        assert [one.number for one in list_versions(config, 2)] == [5, 4]

    def test_what_was_made_of_them_is_marked(self, config, publish):
        for number in range(1, 5):
            versions = publish(number)
        versions.write_state(RegistryState(serving=4, previous=3, pinned=4, rolled_back=[2]))
        assert [one.marks for one in list_versions(config, None)] == [
            ["served", "pinned"],
            ["previous"],
            ["rolled back"],
            [],
        ]

    def test_a_torn_one_does_not_hide_the_others(self, config, publish):
        versions = publish(1)
        publish(2)
        (versions.directory(2) / "manifest.json").write_text("{")
        torn, whole = list_versions(config, None)
        assert "manifest.json cannot be read" in torn.refused
        assert whole.refused is None
        assert "refused" in screen(render_list([torn]))

    def test_without_any_that_is_said(self, config):
        assert screen(render_list(list_versions(config, None))) == "there is no version yet\n"


class TestShow:
    def test_a_whole_one_says_so(self, config, publish):
        versions = publish(1)
        versions.write_state(RegistryState(serving=1))
        for which in (1, "latest", "served"):
            assert show_version(config, which).refused is None
        said = screen(render_one(show_version(config, 1)))
        for fact in ("1, served", "generation 2", "my_model:build", "drop_new 0.25", "whole; serving may take it"):
            assert fact in said

    def test_one_that_was_learned_with_other_arguments_of_the_factory_is_refused(self, config, publish):
        publish(1, args={"hidden": 128, "pretrained": "evil.pt"})
        assert show_version(config, 1).refused == (
            "it was trained with other model.args (pretrained) than [model] has now; set them back to serve it, or "
            "wait for a version that is trained with the new ones"
        )

    def test_a_flipped_bit_is_found(self, config, publish):
        versions = publish(1)
        path = versions.directory(1) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert list_versions(config, None)[0].refused is None, "ls does not read the weights"
        one = show_version(config, 1)
        assert one.refused == f"version 1: {path} does not have its digest"
        assert f"refused: {one.refused}" in " ".join(screen(render_one(one)).split())

    @pytest.mark.parametrize(
        ("published", "why"),
        [
            ({"verdict": "fail", "reasons": ["worse"]}, "the gate failed it: worse"),
            ({"schema": "0" * 64}, "it was learned under another schema than [schema] describes"),
        ],
    )
    def test_why_serving_does_not_take_it(self, config, publish, published, why):
        publish(1, **published)
        assert show_version(config, 1).refused == why

    def test_what_was_ordered_goes_before_the_verdict(self, config, publish):
        versions = publish(1, "fail", ["worse"])
        for state, refused in (
            (RegistryState(promoted=1), None),
            (RegistryState(pinned=1), None),
            (RegistryState(rolled_back=[1]), "it was rejected, or a rollback passed over it"),
        ):
            versions.write_state(state)
            assert show_version(config, 1).refused == refused

    def test_without_a_verdict_it_is_refused(self, config, publish):
        (publish(1).directory(1) / "verdict.json").unlink()
        assert show_version(config, 1).refused == "it has no verdict yet"

    @pytest.mark.parametrize(
        ("which", "sentence"),
        [
            (7, "there is no version 7 in .*; there are 1 to 3"),
            ("served", "serving has taken no version"),
        ],
    )
    def test_one_that_is_not_there_is_named(self, config, publish, which, sentence):
        publish(1)
        publish(3)
        with pytest.raises(SettingsError, match=sentence):
            show_version(config, which)


def test_as_json(config, publish, capsys):
    publish(1)
    arguments = ["-c", str(config.path), "--json"]
    assert cli.main(["versions", "ls", *arguments]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["number"], listed["verdict"]["verdict"], listed["trained_through"]) == (1, "pass", "events:0=10")
    assert cli.main(["versions", "show", "latest", *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == listed


def test_a_word_that_is_no_version_is_one_sentence(config, capsys):
    assert cli.main(["versions", "show", "newest", "-c", str(config.path)]) == 2
    assert capsys.readouterr().err == 'anabranch: "newest" is no version: write a number, latest or served\n'


@pytest.mark.process
def test_torch_is_not_loaded(config, publish):
    publish(1)
    code = (
        "import sys; from anabranch.cli import main\n"
        f"for rest in (['ls'], ['show', '1']): assert main(['versions', *rest, '-c', {str(config.path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture
def run(config, anabranch):
    return lambda *arguments: anabranch("versions", *arguments, "-c", config.path)


def test_a_diff_says_how_far_each_tensor_and_each_figure_has_changed(run, publish):
    publish(3, weights={"same": torch.ones(3), "half": torch.ones(2, 2), "gone": torch.ones(1), "zero": torch.zeros(2)})
    publish(
        5, weights={"same": torch.ones(3), "half": 1.5 * torch.ones(2, 2), "new": torch.ones(()), "zero": torch.ones(2)}
    )
    code, out, err = run("diff", 3, "latest")
    rows = {line[:12].split("  ")[0]: line.split() for line in out.splitlines() if line.strip()}
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert rows["step"][1:] == ["300", "500", "+200"]
    assert rows["events:0"][1:] == ["30", "50", "+20"]
    assert rows["half"][1:] == ["2", "x", "2", "50.000%"]
    assert rows["same"][-1] == "0.000%"
    assert rows["zero"][-2:] == ["was", "zero"]
    assert (rows["gone"][1:], rows["new"][1:]) == (["removed"], ["scalar", "added"])
    document = json.loads(run("diff", 3, 5, "--json")[1])
    assert (document["before"]["step"], document["after"]["trained_through"]) == (300, {"events:0": 50})
    together, half = document["weights"][:2]
    assert together["name"] is None
    assert together["relative_change"] == pytest.approx((3.0 / 7.0) ** 0.5)
    assert (half["name"], half["relative_change"]) == ("half", 0.5)


def test_hashes_of_ids_do_not_hide_in_a_diff_how_far_the_weights_are(run, publish):
    keys = {"learned_features.feature_x.keys": torch.full((9,), 2**63 - 1)}
    for number, factor in ((3, 1.0), (4, 1.5)):
        publish(number, weights={"half": factor * torch.ones(2), **keys})
    together, *_ = json.loads(run("diff", 3, 4, "--json")[1])["weights"]
    assert (together["name"], together["relative_change"]) == (None, 0.5)


def test_an_export_has_the_frozen_weights_too_and_a_diff_says_where_they_differ(run, config, publish, tmp_path):
    content = safetensors.torch.save({"body": torch.ones(5)})
    base, bases = hashlib.sha256(content).hexdigest(), bases_in(config.state_dir)
    bases.write(base, [content])
    publish(3)
    publish(4, base=base)

    assert run("export", 4, tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "base.safetensors").read_bytes() == content
    assert f"base {base}" in " ".join(run("show", 4)[1].split())
    rows = [line.split() for line in run("diff", 3, 4)[1].splitlines()]
    assert ["base", "none", base[:12], "differs"] in rows
    assert json.loads(run("diff", 3, 4, "--json")[1])["after"]["base"] == base

    bases.file(base).write_bytes(content[:-1])
    code, _, err = run("export", 4, tmp_path / "none")
    sentence = f"version 4: its base '{base[:12]}' cannot be used: {bases.file(base)} does not have its digest"
    assert (code, err) == (2, f"anabranch: {sentence}\n")
    assert not (tmp_path / "none").exists()


def test_an_export_is_a_copy_of_weights_and_manifest_or_nothing(run, config, publish, tmp_path):
    versions, folder = publish(3), tmp_path / "new" / "weights"
    assert run("export", "latest", folder) == (0, f"exported version 3 to {folder}\n", "")
    assert sorted(path.name for path in folder.parent.rglob("*")) == ["manifest.json", "model.safetensors", "weights"]
    for name in ("manifest.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (versions.directory(3) / name).read_bytes()
    code, _, err = run("export", 3, folder)
    assert (code, err) == (2, f"anabranch: {folder} exists and is not an empty folder; name another one\n")
    other = tmp_path / "other"
    other.mkdir()
    assert json.loads(run("export", 3, other, "--json")[1])["version"] == 3
    (versions.directory(3) / "model.safetensors").write_bytes(b"damaged")
    code, _, err = run("export", 3, tmp_path / "none")
    assert (code, "does not have its digest" in err) == (2, True)
    assert not (tmp_path / "none").exists()
