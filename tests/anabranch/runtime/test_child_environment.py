"""The learner, with its ingest and the user's model, does not have the admin token; serving does."""

import os
import sys

import pytest

from anabranch.commands.init.command import write_example
from anabranch.config.loader import load_config
from anabranch.runtime.child_process import Part
from anabranch.runtime.supervisor import Supervisor, pipeline_parts

READ, ADMIN = "read-token-of-the-test", "admin-token-of-the-test"
NAMED = "host = '0.0.0.0'\ntokens = {read = {env = 'MY_READ'}, admin = {env = 'MY_ADMIN'}}\n"


@pytest.fixture
def config(tmp_path):
    """`config(more)`: the path of the example's config with more in its section `[serving]`."""

    def write(more=""):
        write_example(tmp_path, force=True)
        path = tmp_path / "pipeline.toml"
        path.write_text(path.read_text("utf-8").replace("[serving]\n", f"[serving]\n{more}"), "utf-8")
        return path

    return write


def environments(path, environment):
    """Return what learner and serving are given in addition to PATH, in this order."""
    parts = pipeline_parts(load_config(path, environment), environment)
    merged = [{**environment, **part.environment} for part in parts]
    return [{name: value for name, value in each.items() if value is not None} for each in merged]


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        ("", {"ANABRANCH__SERVING__TOKENS__READ": READ, "ANABRANCH__SERVING__TOKENS__ADMIN": ADMIN}),
        ("", {"ANABRANCH__SERVING__TOKENS__READ": READ, "ANABRANCH__serving__tokens__admin": f'"{ADMIN}"'}),
        ("", {"ANABRANCH__SERVING__TOKENS": f'{{read = "{READ}", admin = "{ADMIN}"}}'}),
        ("", {"ANABRANCH__SERVING": f'{{host = "0.0.0.0", tokens = {{read = "{READ}", admin = "{ADMIN}"}}}}'}),
        (NAMED, {"MY_READ": READ, "MY_ADMIN": ADMIN}),
        (NAMED, {"MY_READ": READ, "MY_ADMIN": ADMIN, "ANABRANCH__SERVING__HOST": "::", "COPY": ADMIN}),
    ],
)
def test_the_learner_loads_its_config_without_the_admin_token_and_serving_with_it(config, more, environment):
    path = config(more)
    learner, serving = environments(path, environment)
    assert ADMIN not in " ".join(learner.values())
    tokens = load_config(path, learner).pipeline.serving.tokens
    assert (tokens.read.get_secret_value(), tokens.admin.get_secret_value()) == (READ, "")
    assert serving == environment


def test_a_token_that_is_for_both_stays_since_the_learner_asks_for_it(config):
    environment = {"MY_READ": READ, "MY_ADMIN": READ}
    learner, _ = environments(config(NAMED), environment)
    assert learner == environment


def test_without_tokens_the_environment_is_that_of_the_supervisor(config):
    assert environments(config(), {"A": "b"}) == [{"A": "b"}] * 2


@pytest.mark.process
def test_what_a_part_is_not_to_have_is_not_in_its_process(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_ADMIN", ADMIN)
    output = tmp_path / "output"
    code = "import os; print(os.environ.get('MY_ADMIN'), os.environ['COLOUR'])"
    part = Part("part", (sys.executable, "-c", code), environment={"MY_ADMIN": None, "COLOUR": "blue"}, output=output)
    supervisor = Supervisor([part])
    supervisor.start()
    os.waitid(os.P_PID, supervisor.pids()["part"], os.WEXITED | os.WNOWAIT)
    supervisor.stop()
    assert output.read_text() == "None blue\n"
