"""The command line: exit codes, one sentence for each error, and nothing heavy before it is needed."""

import inspect
import io
import json
import logging
import os
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from anabranch import cli
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.core.logs import log_arguments
from anabranch.runtime.supervisor import pipeline_parts
from tests import forkserver
from tools.reference import commands, shown

COMMANDS = list(commands())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(anabranch, command):
    code, out, err = anabranch(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Example: anabranch {command}" in " ".join(out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_all_of_its_texts(anabranch, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    _, out, _ = anabranch(*command.split(), "--help")
    text_out = " ".join(out.split())
    parameters = [each for each in commands()[command].params if each.name != "help"]
    for text in [commands()[command].help, *(getattr(each, "help", "") for each in parameters)]:
        assert shown(text) in text_out


@pytest.mark.parametrize("command", ["", "versions", *COMMANDS])
def test_help_shortens_no_name_at_80_columns(anabranch, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "\N{HORIZONTAL ELLIPSIS}" not in anabranch(*command.split(), "--help")[1]


@pytest.mark.parametrize("command", ["", "versions", *COMMANDS])
def test_help_names_no_value_for_a_flag(anabranch, command):
    assert "<bool>" not in anabranch(*command.split(), "--help")[1]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_short_option_of_help_is_the_long_one(anabranch, command):
    assert anabranch(*command.split(), "-h") == anabranch(*command.split(), "--help")


def test_the_shell_completes_commands(monkeypatch, capsys):
    monkeypatch.setenv("_ANABRANCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "anabranch ver")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        cli.main([])
    assert capsys.readouterr().out.split() == ["versions"]


@pytest.mark.parametrize(
    ("options", "level", "arguments"),
    [
        ([], logging.INFO, ()),
        (["-v"], logging.DEBUG, ("--log-level", "debug")),
        (["--log-level", "error"], logging.ERROR, ("--log-level", "error")),
        (["--log-format", "json"], logging.INFO, ("--log-format", "json")),
    ],
)
def test_the_log_options_hold_for_every_command_and_the_daemons_that_it_starts(
    anabranch, tmp_path, options, level, arguments
):
    assert anabranch(*options, "init", tmp_path)[0] == 0
    assert logging.getLogger().level == level
    assert log_arguments() == arguments
    for part in pipeline_parts(load_config(tmp_path / "pipeline.toml", {}), {}):
        assert part.command[-len(arguments) :] == arguments or not arguments


def test_json_log_lines_are_objects_and_escape_control_characters(anabranch, tmp_path, capsys):
    anabranch("--log-format", "json", "init", tmp_path)
    handler = logging.getLogger().handlers[0]
    handler.setStream(stream := io.StringIO())
    try:
        raise ValueError("inner")
    except ValueError:
        logging.getLogger("test").exception("\x1b[2J %d", 7)
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "test", "\x1b[2J 7")
    assert "\x1b" not in line
    assert "ValueError: inner" in entry["exception"]


def test_without_a_command_the_help_is_shown(anabranch):
    code, out, err = anabranch()
    assert (code, err) == (2, "")
    assert all(command.split()[0] in out for command in COMMANDS)


def test_the_version_is_that_of_the_distribution(anabranch):
    assert anabranch("--version") == (0, f"{version('anabranch')}\n", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["deom"], "anabranch: no such command 'deom'. Did you mean 'demo'?"),
        (["produce"], "anabranch produce: missing argument 'FILE' (see \"anabranch produce --help\")\n"),
        (["demo", "--events", "0"], "anabranch demo: invalid value for '--events'"),
        (["up", "--nope"], "anabranch up: no such option: --nope"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(anabranch, arguments, sentence):
    code, out, err = anabranch(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(sentence)
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["up"], ["learn"], ["serve"], ["status"], ["produce", "events.jsonl"]])
def test_a_missing_config_is_one_sentence_and_exit_code_2(anabranch, tmp_path, command):
    code, out, err = anabranch(*command, "-c", tmp_path / "none.toml")
    assert (code, out) == (2, "")
    assert err == f'anabranch: {tmp_path}/none.toml does not exist; "anabranch init DIR" writes an example\n'


def test_the_config_is_pipeline_toml_here_unless_named(anabranch, example, monkeypatch):
    monkeypatch.chdir(example)
    code, out, err = anabranch("status")
    assert (code, err) == (0, "")
    assert "not running" in out


def test_status_as_json_is_one_object(anabranch, example):
    code, out, err = anabranch("status", "-c", example / "pipeline.toml", "--json")
    assert (code, err, json.loads(out)["name"]) == (0, "", "digits")


def test_init_writes_and_refuses(anabranch, tmp_path):
    code, out, err = anabranch("init", tmp_path / "digits")
    assert (code, err) == (0, "")
    assert "anabranch up" in out
    code, out, err = anabranch("init", tmp_path / "digits")
    assert (code, out) == (2, "")
    assert err == f"anabranch: {tmp_path}/digits/pipeline.toml exists already; --force overwrites it\n"
    assert anabranch("init", tmp_path / "digits", "--force")[0] == 0


@pytest.mark.parametrize("command", [pytest.param(["up"], marks=pytest.mark.slow), ["produce", "events.jsonl"]])
@pytest.mark.process
def test_an_unreachable_broker_is_one_sentence_and_exit_code_3(example, free_port, command):
    port = free_port()
    done = forkserver.run(
        ["-m", "anabranch", *command, "-c", "pipeline.toml"],
        cwd=example,
        env={
            "PATH": "",
            "ANABRANCH__STREAM__BOOTSTRAP_SERVERS": f"127.0.0.1:{port}",
            "ANABRANCH__LEARNER__STATUS": "127.0.0.1:0",
            "ANABRANCH__SERVING__PORT": "0",
        },
        timeout=90,
    )
    assert done.returncode == 3
    said = [line for line in done.stderr.splitlines() if line.startswith("anabranch: ") and "stopping" not in line]
    assert said == [f"anabranch: no Kafka broker can be reached at 127.0.0.1:{port}: Connection refused"]


@pytest.mark.process
def test_a_bug_is_exit_code_1_with_a_traceback_that_shows_no_values(tmp_path):
    code = (
        "import anabranch.commands.init.command\n"
        "def broken(folder, *, force):\n    secret = 'hunter' + '2'\n    raise RuntimeError('bug')\n"
        "anabranch.commands.init.command.write_example = broken\n"
        "import sys; from anabranch.cli import main; sys.exit(main(['init', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: bug" in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.process
def test_the_command_line_loads_nothing_heavy():
    libraries = ("torch", "kafka", "sklearn", "starlette", "numpy")
    heavy = (*libraries, "anabranch.config.loader", "learner", "serving", "replay")
    code = f"import sys, anabranch.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("command", "private"), [("versions lineage", True), ("versions export", False)])
def test_what_a_command_writes_is_for_its_user_alone_unless_it_is_made_to_be_passed_on(
    anabranch, tmp_path, monkeypatch, command, private
):
    def load_config(*_, **__):
        (tmp_path / "written").touch()
        raise SettingsError("seen")

    monkeypatch.setattr("anabranch.command.load_config", load_config)
    before = os.umask(0o022)
    try:
        assert anabranch(*command.split(), "1", *([] if private else [str(tmp_path / "out")]))[0] == 2
        (tmp_path / "after").touch()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("written", "after")]
    assert modes == [0o600 if private else 0o644, 0o644]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_words_of_a_command_are_the_path_of_its_file(command):
    first, *after = (word.replace("-", "_") for word in command.split())
    folder = Path("anabranch/commands") / first
    paths = {folder.with_suffix(".py"), folder / "command.py"}
    if after:
        paths = {folder.with_suffix(".py"), folder / f"{after[0]}.py", folder / after[0] / "command.py"}
    source = inspect.getsourcefile(inspect.unwrap(commands()[command].callback))
    assert source is not None
    assert Path(source).relative_to(Path(cli.__file__).parents[1]) in paths


@pytest.mark.process
def test_the_help_of_all_commands_loads_no_torch():
    code = f"import sys; from anabranch.cli import find; [find(*name.split()) for name in {COMMANDS}];"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
