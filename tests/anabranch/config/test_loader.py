"""`pipeline.toml`: what is read from it, and one sentence for everything that is wrong with it."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from anabranch.command import ConfigFile
from anabranch.commands.config import render_toml, resolved_config
from anabranch.config.loader import examine_config, load_config
from anabranch.config.pipeline import Pipeline, alternatives
from anabranch.core.errors import SettingsError
from anabranch.ingest.settings.features import HashBuckets, TokenizerFile, Vocabulary
from anabranch.learner.versions.format import reference_to
from anabranch.learner.versions.origin import settings_of_weights

TEMPLATE = Path(__file__).parents[3] / "anabranch" / "commands" / "init" / "template" / "pipeline.toml"
SMALLEST = {
    "": 'name = "digits"',
    "stream": 'topics = ["events"]',
    "schema.features.x": 'dtype = "float32"\nshape = [64]',
    "schema.label": 'name = "y"\nclasses = 10',
    "model": 'factory = "my_model:build"',
}


@pytest.fixture
def load(tmp_path):
    """Loads the smallest pipeline with sections put in place of it, or added: `load({"learner": ...}, environment)`."""

    def load(sections=None, environment=None):
        merged = SMALLEST | (sections or {})
        text = "\n".join(f"[{name}]\n{body}" if name else body for name, body in merged.items())
        path = tmp_path / "pipeline.toml"
        path.write_text(text, encoding="utf-8")
        return load_config(path, environment or {})

    return load


@pytest.fixture
def refused(load):
    """Returns the sentence with which a pipeline is refused."""

    def refused(sections=None, environment=None):
        with pytest.raises(SettingsError) as caught:
            load(sections, environment)
        sentence = str(caught.value)
        assert "\n" not in sentence
        return sentence

    return refused


class TestDefaults:
    def test_are_those_of_the_design(self, load):
        config = load()
        pipeline = config.pipeline
        assert (pipeline.state_dir, pipeline.seed) == (config.folder / "var", 0)
        stream = pipeline.stream
        assert stream.bootstrap_servers == "localhost:9092"
        assert (stream.dead_letter_topic, stream.group_id) == ("events.dead", "anabranch-digits")
        assert (stream.format, stream.start, stream.on_gap) == ("json", "earliest", "fail")
        assert (stream.unlabelled, stream.isolation_level) == ("skip", "read_committed")
        assert (stream.client, stream.properties, stream.start_time) == ("kafka-python", {}, None)
        assert (pipeline.events.features["x"].shape, pipeline.events.label.dtype) == ((64,), "int64")
        assert (pipeline.model.args, pipeline.model.task) == ({}, "classification")
        learner = pipeline.learner
        assert (learner.batch_size, learner.replay_ratio, learner.strategy.name) == (64, 1.0, "er")
        assert (learner.optimizer.name, learner.optimizer.lr) == ("adamw", 1e-3)
        assert (learner.precision, learner.device, learner.status) == ("auto", "auto", "127.0.0.1:8001")
        assert learner.stop_timeout == timedelta(seconds=30)
        replay = pipeline.replay
        assert (replay.admission, replay.sampling) == ("reservoir", "uniform")
        assert (replay.capacity, replay.device_bytes) == (1_000_000, 256_000_000)
        versions = pipeline.versions
        assert (versions.publish_every, versions.keep, versions.keep_hourly) == (timedelta(seconds=1), 20, 24)
        assert (pipeline.gate.holdout_fraction, pipeline.gate.holdout_rows) == (0.01, 2000)
        serving = pipeline.serving
        assert (serving.host, serving.port, serving.max_batch) == ("127.0.0.1", 8000, 64)
        assert serving.max_delay == timedelta(milliseconds=2)
        assert (serving.tokens.read.get_secret_value(), serving.tokens.admin.get_secret_value()) == ("", "")
        assert (serving.tls.cert, serving.tls.key) == (None, None)

    def test_the_example_that_ships_is_valid(self):
        assert load_config(TEMPLATE, {}).pipeline.name == "digits"

    def test_the_state_directory_is_next_to_the_file(self, load, tmp_path):
        assert load().state_dir == tmp_path / "var"
        assert load({"": 'name = "d"\nstate_dir = "/elsewhere"'}).state_dir == Path("/elsewhere")

    def test_the_settings_cannot_be_changed(self, load):
        with pytest.raises(ValueError, match="frozen"):
            load().pipeline.stream.format = "rows"


class TestFile:
    def test_what_does_not_go_together_is_refused(self, refused):
        sentence = refused({"learner": "deterministic = true", "replay": 'sampling = "similar"'})
        assert 'replay.sampling = "similar" does not go with learner.deterministic = true' in sentence
        assert sentence.endswith('take "uniform"')

    def test_one_that_is_missing_names_the_way_out(self, tmp_path):
        with pytest.raises(SettingsError, match=r'does not exist; "anabranch init DIR" writes an example'):
            load_config(tmp_path / "none.toml", {})

    def test_one_that_is_no_toml_names_the_line(self, refused):
        assert "line 2" in refused({"": 'name = "d"\nseed = = 3'})

    def test_one_that_is_no_text_is_refused(self, tmp_path):
        path = tmp_path / "pipeline.toml"
        path.write_bytes(b"name = '\xff'")
        with pytest.raises(SettingsError, match="cannot be read"):
            load_config(path, {})

    def test_a_folder_is_refused(self, tmp_path):
        with pytest.raises(SettingsError, match="cannot be read"):
            load_config(tmp_path, {})


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("section", "body", "key", "nearest"),
        [
            ("learnr", "batch_size = 3", "learnr", "learner"),
            ("learner", "batchsize = 3", "learner.batchsize", "batch_size"),
            ("stream", 'topic = ["events"]', "stream.topic", "topics"),
            ("schema.features.x", 'dtyp = "float32"', "schema.features.x.dtyp", "dtype"),
            ("schema.label", 'name = "y"\nclases = 10', "schema.label.clases", "classes"),
            ("serving.tokens", 'reed = "secret"', "serving.tokens.reed", "read"),
            ("schema.features.x.encode", "vocab = ['a']\nvocap = 3", "schema.features.x.encode.vocap", "vocab"),
        ],
    )
    def test_are_named_with_the_nearest_known_one(self, refused, section, body, key, nearest):
        sentence = refused({section: body})
        assert sentence.endswith(f'unknown key {key}; the nearest known key is "{nearest}"')
        assert "pipeline.toml: " in sentence

    def test_that_are_like_none_are_answered_with_all(self, refused):
        assert refused({"gate": "zzz = 1"}).endswith(
            "unknown key gate.zzz; known keys are holdout_fraction, holdout_rows, live, max_drop_new, "
            "max_drop_old, max_hold, measures, min_rows, on_hold, slices"
        )

    def test_are_free_where_the_user_gives_the_names(self, load):
        sections = {"learner": 'optimizer = {name = "sgd", momentum = 0.9}', "model": 'factory = "m:b"\nargs = {a = 1}'}
        pipeline = load(sections).pipeline
        assert pipeline.learner.optimizer.model_extra == {"momentum": 0.9}
        assert pipeline.model.args == {"a": 1}


class TestValues:
    @pytest.mark.parametrize(
        ("section", "body", "sentence"),
        [
            ("", "seed = 1", "name is missing; write name = ... at the top: "),
            ("", 'name = "a b"', 'name = \'a b\': write letters, digits, ".", "_" and "-", such as'),
            ("learner", 'replay_ratio = "often"', "learner.replay_ratio = 'often': Input should be 'auto' or a number"),
            ("stream", "", "stream.topics is missing; write topics = ... below [stream]: "),
            ("schema.label", "classes = 10", "schema.label.name is missing; write name = ... below [schema.label]: "),
            ("stream", "topics = []", "stream.topics = []: List should have at least 1 item"),
            ("stream", 'topics = "events"', "stream.topics = 'events': Input should be a valid list"),
            ("stream", 'topics = ["a b"]', "stream.topics.0 = 'a b': write letters, digits,"),
            ("stream", 'topics = ["a", "a"]', "stream: topics names a topic twice"),
            (
                "stream",
                'topics = ["a"]\nformat = "csv"',
                "stream.format = 'csv': write 'json', 'rows', 'arrow', 'avro', 'protobuf', 'json-schema', an import",
            ),
            (
                "stream",
                'topics = ["a"]\nstart = "soon"',
                'stream.start = \'soon\': write "earliest", "latest" or an ISO',
            ),
            ("stream", 'topics = ["a"]\ndead_letter_topic = "a"', "stream: dead_letter_topic, by default"),
            ("stream", 'topics = ["a", "a.dead"]', "stream: dead_letter_topic, by default the first topic with .dead"),
            ("schema.label", 'name = "y"\nclasses = 1', "schema.label.classes = 1: Input should be greater than or"),
            (
                "schema.label",
                'name = "y"\nclasses = ["a"]',
                "schema.label.classes = ['a']: List should have at least 2",
            ),
            ("schema.label", 'name = "y"\nclasses = ["a", "a"]', "schema.label: classes names a class twice"),
            (
                "schema.label",
                'name = "y"\nclasses = 2\nmulti = true\nlength = 3',
                "schema.label: length says that an event has one",
            ),
            (
                "schema.label",
                'name = "y"\nclasses = ["a", ""]\nlength = 3',
                'schema.label: with length, no class may be named ""',
            ),
            (
                "schema.label",
                'name = "y"\ndtype = "uint8"\nclasses = 2\nlength = 3',
                "schema.label: with length, a position without a class is -100",
            ),
            ("schema.label", 'name = "y"\nmulti = true', "schema.label: multi = true says that an event has several"),
            (
                "schema.label",
                'name = "y"\ndtype = "float32"\nclasses = 2',
                "schema.label: labels of 2 classes are whole",
            ),
            ("schema.label", 'name = "y"', "schema.label: without classes the task is regression, which needs a float"),
            ("schema.label", 'name = "x"\nclasses = 2', "schema: two fields are named 'x'"),
            ("schema.features.x", 'dtype = "string"', 'schema.features.x: a feature of dtype "string" needs encode'),
            (
                "schema.features.x",
                'dtype = "int8"\nencode = {hash = 9}',
                'schema.features.x: a feature of dtype "string"',
            ),
            (
                "schema.features.x",
                'dtype = "string"\nencode = {}',
                "schema.features.x.encode: write {vocab = [...]}, {hash = N}, {learn = N} or {tokenizer",
            ),
            (
                "schema.features.x",
                'dtype = "string"\nencode = {vocab = []}',
                "schema.features.x.encode.vocab = []: List",
            ),
            (
                "schema.features.x",
                'dtype = "string"\nencode = {tokenizer = "t.json", length = 0}',
                "schema.features.x.encode.length = 0: Input should be greater",
            ),
            (
                "schema.features.x",
                'dtype = "float32"\nshape = [0]',
                "schema.features.x.shape.0 = 0: Input should be great",
            ),
            ("schema.features.x", 'dtype = "float31"', "schema.features.x.dtype = 'float31': Input should be"),
            (
                "model",
                'factory = "my_model"',
                "model.factory = 'my_model': write module:function, such as \"my_model:build\"",
            ),
            ("learner", "batch_size = 0", "learner.batch_size = 0: Input should be greater than or equal to 1"),
            ("learner", "max_delay = 3", "learner.max_delay = 3: write a duration as a number and a unit"),
            ("learner", 'max_delay = "0s"', "learner.max_delay = '0s': must be longer than 0s"),
            ("learner", 'max_delay = "9999999999d"', "learner.max_delay = '9999999999d': is longer than a duration"),
            ("learner", 'status = "8001"', "learner.status = '8001': write \"HOST:PORT\""),
            ("learner", 'device = "tpu"', 'learner.device = \'tpu\': write "auto", "cpu",'),
            ("learner", "optimizer = {lr = 0}", "learner.optimizer.lr = 0: Input should be greater than 0"),
            ("replay", 'device_bytes = "3 XB"', "replay.device_bytes = '3 XB': could not interpret byte unit: XB"),
            ("gate", "holdout_fraction = 1.0", "gate.holdout_fraction = 1.0: Input should be less than 1"),
            ("serving", "port = 70000", "serving.port = 70000: Input should be less than or equal to 65535"),
            ("serving", 'timeout = "0s"', "serving.timeout = '0s': must be longer than 0s"),
            ("serving.tls", 'cert = "cert.pem"', "serving.tls: cert and key go together"),
        ],
    )
    def test_that_are_wrong_are_named_with_key_value_and_rule(self, refused, tmp_path, section, body, sentence):
        assert refused({section: body}).startswith(f"{tmp_path / 'pipeline.toml'}: {sentence}")

    @pytest.mark.parametrize(
        ("args", "key", "name"),
        [
            ('{hub = {token = {env = "HUB_TOKEN"}}}', "model.args.hub.token", "HUB_TOKEN"),
            ('{keys = ["a", {file = "token"}]}', "model.args.keys.1", "token"),
            ('{env = "ARGS"}', "model.args", "ARGS"),
        ],
    )
    def test_arguments_of_the_factory_take_no_secrets(self, refused, monkeypatch, args, key, name):
        monkeypatch.setenv("HUB_TOKEN", "hunter-2")
        assert refused({"model": f'factory = "m:b"\nargs = {args}'}) == (
            f"{key}: it is stored in every version and shown in errors, so it holds no secret; write the value, or "
            f"have the model's code read {name} itself"
        )

    def test_the_nearest_of_the_values_is_named(self, refused):
        assert refused({"learner": 'strategy = "a-gem"'}).endswith('; the nearest known value is "agem"')

    def test_a_section_that_is_missing_is_named_with_what_it_is_for(self, refused, monkeypatch):
        monkeypatch.delitem(SMALLEST, "schema.label")
        assert refused().endswith(": schema.label is missing; write a section [schema.label]: What is to be predicted")
        monkeypatch.delitem(SMALLEST, "schema.features.x")
        assert "schema.features is missing; write a section [schema.features.NAME]" in refused(
            {"schema.label": "name = 'y'"}
        )

    def test_sentences_are_the_same_where_sources_are_not_installed(self, refused, monkeypatch):
        def gone(_):
            raise OSError("could not get source code")

        monkeypatch.setattr("inspect.getsource", gone)
        assert refused({"learner": "batchsize = 3"}).endswith('the nearest known key is "batch_size"')

    def test_a_section_that_is_a_value_is_refused(self, refused):
        assert refused({"": 'name = "d"\nlearner = 3'}).endswith("learner = 3: must be a section")

    def test_durations_and_sizes_are_read_with_their_units(self, load):
        pipeline = load({"learner": 'stop_timeout = "1.5m"', "replay": 'device_bytes = "1MiB"'}).pipeline
        assert pipeline.learner.stop_timeout == timedelta(seconds=90)
        assert pipeline.replay.device_bytes == 2**20

    @pytest.mark.parametrize("start", ['"2026-01-31T08:00:00Z"', "2026-01-31T08:00:00Z", '"2026-01-31T08:00"'])
    def test_a_start_is_a_time_with_and_without_quotes(self, load, start):
        stream = load({"stream": f'topics = ["a"]\nstart = {start}'}).pipeline.stream
        assert stream.start_time == datetime(2026, 1, 31, 8, tzinfo=UTC)

    def test_a_start_may_be_a_day(self, load):
        stream = load({"stream": 'topics = ["a"]\nstart = 2026-01-31'}).pipeline.stream
        assert stream.start_time == datetime(2026, 1, 31, tzinfo=UTC)

    @pytest.mark.parametrize(("encode", "kind"), [("{hash = 8}", HashBuckets), ("{vocab = ['a']}", Vocabulary)])
    def test_strings_are_encoded_in_either_way(self, load, encode, kind):
        pipeline = load({"schema.features.x": f'dtype = "string"\nencode = {encode}'}).pipeline
        assert isinstance(pipeline.events.features["x"].encode, kind)

    def test_the_path_of_a_tokenizer_is_relative_to_the_file(self, load):
        encode = '{tokenizer = "model/tokenizer.json", length = 64}'
        config = load({"schema.features.x": f'dtype = "string"\nencode = {encode}'})
        encoding = config.pipeline.events.features["x"].encode
        assert encoding == TokenizerFile(tokenizer=config.folder / "model/tokenizer.json", length=64)

    def test_features_keep_the_order_of_the_file(self, load):
        sections = {"schema.features.b": 'dtype = "int8"', "schema.features.a": 'dtype = "int8"'}
        assert list(load(sections).pipeline.events.features) == ["x", "b", "a"]


class TestEnvironment:
    def test_overrides_a_key(self, load):
        environment = {
            "ANABRANCH__STREAM__BOOTSTRAP_SERVERS": "kafka:9092",
            "ANABRANCH__STREAM__TOPICS": '["a", "b"]',
            "ANABRANCH__LEARNER__BATCH_SIZE": "8",
            "ANABRANCH__LEARNER__STOP_TIMEOUT": "5s",
            "ANABRANCH__SERVING__TOKENS__READ": "open sesame",
            "ANABRANCH__MODEL__ARGS__HIDDEN": "7",
            "OTHER": "x",
        }
        pipeline = load({"gate": "holdout_rows = 5"}, environment).pipeline
        assert pipeline.stream.bootstrap_servers == "kafka:9092"
        assert pipeline.stream.topics == ("a", "b")
        assert pipeline.stream.dead_letter_topic == "a.dead"
        assert (pipeline.learner.batch_size, pipeline.learner.stop_timeout) == (8, timedelta(seconds=5))
        assert pipeline.serving.tokens.read.get_secret_value() == "open sesame"
        assert pipeline.model.args == {"hidden": 7}
        assert pipeline.gate.holdout_rows == 5

    @pytest.mark.parametrize("text", ["{log_loss = 0.02, brier = 0.01}", '{"log_loss": 0.02, "brier": 0.01}'])
    def test_a_table_is_toml_or_json(self, load, text):
        assert load({}, {"ANABRANCH__GATE__MEASURES": text}).pipeline.gate.measures == {"log_loss": 0.02, "brier": 0.01}

    @pytest.mark.parametrize("turn", [1, -1])
    def test_a_name_and_its_arguments_come_in_any_order(self, load, turn):
        names = ["ANABRANCH__LEARNER__STRATEGY", "ANABRANCH__LEARNER__STRATEGY__ALPHA"]
        environment = dict(list(zip(names, ["der++", "0.9"], strict=True))[::turn])
        strategy = load({}, environment).pipeline.learner.strategy
        assert (strategy.name, strategy.model_extra) == ("der++", {"alpha": 0.9})

    def test_overrides_a_field_of_the_schema_by_the_name_in_the_file(self, load):
        sections = {"schema.features.Temp": 'dtype = "int8"'}
        environment = {
            "ANABRANCH__SCHEMA__FEATURES__TEMP__DTYPE": "int16",
            "ANABRANCH__SCHEMA__FEATURES__X__SHAPE": "[3]",
        }
        features = load(sections, environment).pipeline.events.features
        assert (features["Temp"].dtype, features["x"].shape, list(features)) == ("int16", (3,), ["x", "Temp"])

    @pytest.mark.parametrize("text", ["1e5", "007", "true", "12345", "2026-01-31", "a = 1\nb = 2", "[1, 2]", "{"])
    def test_leaves_a_string_as_it_is(self, load, text):
        environment = {"ANABRANCH__SERVING__TOKENS__READ": text, "ANABRANCH__STREAM__GROUP_ID": text}
        environment["ANABRANCH__STREAM__PROPERTIES__SASL.PASSWORD"] = text
        pipeline = load(None, environment).pipeline
        assert pipeline.serving.tokens.read.get_secret_value() == text
        assert pipeline.stream.group_id == text
        assert pipeline.stream.properties["sasl.password"].get_secret_value() == text

    def test_strings_may_have_quotes_and_may_name_another_variable(self, load):
        environment = {
            "ANABRANCH__STREAM__GROUP_ID": '"g"',
            "ANABRANCH__SERVING__TOKENS__READ": '{env = "T"}',
            "T": "x",
        }
        pipeline = load(None, environment).pipeline
        assert (pipeline.stream.group_id, pipeline.serving.tokens.read.get_secret_value()) == ("g", "x")

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("ANABRANCH__LERNER__BATCH_SIZE", 'there is no key lerner; the nearest known key is "learner"'),
            ("ANABRANCH__LEARNER__BATCHSIZE", 'there is no key batchsize; the nearest known key is "batch_size"'),
            ("ANABRANCH__SCHEMA__FEATURES__X__DTYP", 'there is no key dtyp; the nearest known key is "dtype"'),
            ("ANABRANCH__NAME__FIRST", "name is a value, not a section"),
            ("ANABRANCH__", "there is no key ; known keys are"),
        ],
    )
    def test_a_misspelt_variable_is_an_error(self, refused, name, sentence):
        assert refused(None, {name: "3"}).startswith(f"{name}: {sentence}")

    @pytest.mark.parametrize(
        ("name", "value", "sentence"),
        [
            ("LEARNER__BATCH_SIZE", "many", "learner.batch_size = 'many': "),
            ("STREAM__TOPICS", '["a b"]', "stream.topics.0 = 'a b': "),
            ("LEARNER__STRATEGY", "a-gem", "learner.strategy = 'a-gem': "),
            ("LEARNER__STANDBY", "true", "learner.standby = true does not go with learner.replicas"),
            ("LEARNER__STATUS", "0.0.0.0:8001", 'learner.status = "0.0.0.0:..." is not loopback'),
        ],
    )
    def test_a_wrong_value_is_reported_with_the_name_of_the_variable(self, refused, name, value, sentence):
        name = f"ANABRANCH__{name}"
        message = refused({"learner": "replicas = 2"}, {name: value})
        assert message.startswith(f"{name}: {sentence}")


class TestSecrets:
    def test_come_from_variables_and_files(self, load, tmp_path):
        (tmp_path / "token").write_text("from a file\n")
        sections = {
            "serving.tokens": 'read = {env = "TOKEN"}\nadmin = {file = "token"}',
            "stream.properties": '"sasl.username" = {env = "USER_NAME"}',
        }
        pipeline = load(sections, {"TOKEN": "from a variable", "USER_NAME": "alice"}).pipeline
        assert pipeline.serving.tokens.read.get_secret_value() == "from a variable"
        assert pipeline.serving.tokens.admin.get_secret_value() == "from a file"
        assert pipeline.stream.properties["sasl.username"].get_secret_value() == "alice"

    @pytest.mark.parametrize(
        ("value", "sentence"),
        [
            ('{env = "NONE"}', "serving.tokens.read: the environment variable NONE is not set"),
            ('{file = "none"}', "serving.tokens.read: cannot read "),
            ('{file = "binary"}', "serving.tokens.read: "),
        ],
    )
    def test_one_that_is_not_there_is_an_error(self, refused, tmp_path, value, sentence):
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        assert refused({"serving.tokens": f"read = {value}"}).startswith(sentence)

    def test_are_not_in_the_settings_text(self, load):
        sections = {
            "serving.tokens": 'read = "hunter2"',
            "stream.properties": '"sasl.password" = "hunter2"',
        }
        pipeline = load(sections).pipeline
        assert "hunter2" not in repr(pipeline) + str(pipeline) + pipeline.model_dump_json()

    @pytest.mark.parametrize(
        ("section", "body"),
        [
            ("serving", 'port = {env = "S"}'),
            ("serving", 'tokens = "hunter 2"'),
            ("", 'name = "d"\nserving = "hunter 2"'),
            ("storage", 'url = "s3://b"\noptions = "hunter 2"'),
            ("stream.registry", 'url = "https://r"\nuser = "a"\npassword = ["hunter 2"]'),
            ("serving.tokens", 'read = ["hunter 2"]'),
            ("stream.properties", '"sasl.password" = ["hunter 2"]'),
            ("stream.properties", '"sasl.passwort" = "hunter 2"'),
            ("replay", 'redis = {url = "http://me:hunter 2@host", bytes = "1MB"}'),
            ("replay", 'redis = {url = ["hunter 2"], bytes = "1MB"}'),
        ],
    )
    def test_are_never_printed(self, load, section, body):
        with pytest.raises(SettingsError) as caught:
            load({section: body}, {"S": "hunter 2"})
        error = caught.value
        assert "(hidden)" in str(error)
        assert "hunter" not in str(error)
        assert (error.__cause__, error.__suppress_context__) == (None, True)


def leaves(section=Pipeline, above=()):
    """Yield the keys that lead to each setting; NAME where the user gives the name."""
    for name, field in section.model_fields.items():
        location = (*above, field.alias or name)
        kinds = alternatives(field.annotation)
        inner = [each for kind in kinds if get_origin(kind) is dict for each in alternatives(get_args(kind)[1])]
        models = [kind for kind in (*kinds, *inner) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        for model in models:
            yield from leaves(model, (*location, *(["NAME"] if model in inner else [])))
        if not models:
            yield (*location, *(["NAME"] if inner else []))


LEAVES = sorted(set(leaves()))


@pytest.mark.slow
def test_a_secret_at_any_key_is_refused_or_leaves_with_no_version_and_no_sentence(tmp_path, monkeypatch):
    path, secret, taken = tmp_path / "pipeline.toml", "hunter2", set()
    monkeypatch.setenv("S", secret)
    for location in LEAVES:
        document: dict[str, Any] = {
            "name": "d",
            "stream": {"topics": ["a"]},
            "schema": {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}},
            "model": {"factory": "m:build"},
        }
        table = document
        for key in location[:-1]:
            table = table.setdefault(key, {})
        table[location[-1]] = {"env": "S"}
        path.write_text(render_toml(document))
        examined = examine_config(path)
        assert secret not in " ".join(sentence for _, sentence in examined.faults), location
        if examined.config is None or examined.faults:
            continue
        taken.add(location)
        pipeline = examined.config.pipeline
        weights = settings_of_weights(examined.config.pipeline)
        published = weights, reference_to(pipeline.model), pipeline.events, pipeline.name
        assert secret not in f"{published} {resolved_config(ConfigFile(path, ()))}", location
    assert {("serving", "tokens", "read"), ("serving", "baseline"), ("state_dir",)} <= taken


@pytest.mark.parametrize(
    ("variable", "text", "key"),
    [
        ("MODEL__ARGS__HUB_TOKEN", "hunter2", "model.args.hub_token"),
        ("MODEL__ARGS", '{layers = 3, hub = {token = "hunter2"}}', "model.args"),
        ("MODEL__TEACHER", '{factory = "m:t", args = {keys = ["hunter2"]}}', "model.teacher"),
        ("MODEL__TEACHER__ARGS__TOKEN", "hunter2", "model.teacher.args.token"),
        ("MODEL__TEACHER__VERSION__ARGS__TOKEN", "hunter2", "model.teacher.version.args.token"),
        ("LEARNER__OPTIMIZER__TOKEN", "hunter2", "learner.optimizer.token"),
    ],
)
def test_a_text_of_the_environment_is_no_argument_that_versions_contain(refused, variable, text, key):
    sentence = refused(None, {f"ANABRANCH__{variable}": text})
    assert sentence.startswith(
        f"ANABRANCH__{variable}: a text of the environment may be a secret, and {key} is stored in "
    )
    assert "hunter2" not in sentence


def test_files_of_the_history_are_relative_to_the_folder_of_the_config(load):
    section = {"stream.backfill": 'files = ["lake/*.parquet", "/data/*.pq", "s3://lake/*.parquet"]'}
    config = load(section)
    backfill = config.pipeline.stream.backfill
    assert backfill is not None
    assert backfill.files == (f"{config.folder.absolute()}/lake/*.parquet", "/data/*.pq", "s3://lake/*.parquet")


class TestTokens:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
    def test_are_required_off_loopback(self, refused, host):
        sentence = refused({"serving": f'host = "{host}"'})
        assert sentence.endswith(f'serving: tokens.read is required because host "{host}" is not loopback')
        sentence = refused({"serving": f'host = "{host}"', "serving.tokens": 'read = "r"'})
        assert sentence.endswith(f'serving: tokens.admin is required because host "{host}" is not loopback')

    def test_suffice_off_loopback(self, load):
        tokens = load(
            {"serving": 'host = "0.0.0.0"', "serving.tokens": 'read = "r"\nadmin = "a"'}
        ).pipeline.serving.tokens
        assert (tokens.read.get_secret_value(), tokens.admin.get_secret_value()) == ("r", "a")

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
    def test_are_not_needed_on_loopback(self, load, host):
        assert load({"serving": f'host = "{host}"'}).pipeline.serving.host == host

    def test_the_learners_address_needs_one_too(self, refused, load):
        sections = {"learner": 'status = "0.0.0.0:8001"'}
        assert re.search(r'learner.status = "0.0.0.0:..." is not loopback, so serving.tokens.read', refused(sections))
        load(sections | {"serving.tokens": 'read = "r"'})


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ('versions_from = "storage"', 'serving.versions_from = "storage" needs the section [storage]'),
        ("canary = 0.1", "serving.canary = 0.1 needs the section [storage]"),
    ],
)
def test_a_fleet_needs_an_object_store(load, refused, key, sentence):
    assert sentence in refused({"serving": key})
    load({"serving": key, "storage": 'url = "memory://fleet/state"'})


def test_canaries_need_held_out_events(load, refused):
    sections = {"serving": "canary = 0.1", "storage": 'url = "memory://fleet/state"'}
    sentence = refused({**sections, "gate": "holdout_fraction = 0"})
    assert "serving.canary = 0.1 compares versions on held-out events, and gate.holdout_fraction = 0 holds" in sentence
    load(sections)


class TestAnswersInATopic:
    @pytest.mark.parametrize(
        ("more", "sentence"),
        [
            ('topics = ["in"]\noutput = "in"', 'output = "in" is one of topics: answers would be answered again'),
            ('topics = ["in", "in"]\noutput = "out"', "topics names a topic twice"),
            ('topics = ["in"]\noutput = "events"', 'output = "events" is one of stream.topics: the learner would read'),
            ('topics = ["in"]\noutput = "events.dead"', 'names "events.dead", the topic of dead letters'),
            ('topics = ["events.dead"]\noutput = "out"', 'names "events.dead", the topic of dead letters'),
            ('topics = ["in"]\noutput = "out"\ngroup_id = "learners"', '"learners" is stream.group_id'),
            ('topics = ["in"]', "serving.stream.output"),
        ],
    )
    def test_are_refused_where_topics_or_groups_are_those_of_others(self, refused, more, sentence):
        stream = SMALLEST["stream"] + '\ngroup_id = "learners"'
        assert sentence in refused({"stream": stream, "serving.stream": more})

    @pytest.mark.parametrize(
        ("more", "sentence"),
        [
            ('topic = "events"', 'serving.log.topic = "events" is of stream.topics too'),
            ('topic = "events.dead"', 'serving.log.topic = "events.dead" is of stream.dead_letter_topic too'),
            ('topic = "in"', 'serving.log.topic = "in" is of serving.stream.topics too'),
            ('topic = "out"', 'serving.log.topic = "out" is of serving.stream.output too'),
            ('topic = "log"\nsample = 0', "serving.log.sample"),
            ('topic = "log"\nsample = 1.5', "serving.log.sample"),
            ("sample = 0.5", "serving.log.topic"),
        ],
    )
    def test_are_not_logged_into_the_topics_of_others(self, refused, more, sentence):
        assert sentence in refused({"serving.stream": 'topics = ["in"]\noutput = "out"', "serving.log": more})

    def test_come_from_topics_that_are_learned_or_others(self, load):
        answers = load({"serving.stream": 'topics = ["events", "more"]\noutput = "out"'}).pipeline.serving.stream
        assert answers.group_of("tiny") == "anabranch-tiny-answers"
        assert answers.delivery == "exactly-once"


def faults_of(tmp_path, sections):
    path = tmp_path / "pipeline.toml"
    text = "\n".join(f"[{name}]\n{body}" if name else body for name, body in (SMALLEST | sections).items())
    path.write_text(text, encoding="utf-8")
    return examine_config(path, {}).faults


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"stream": 'topics = ["^r4.*"]'}, "stream.topics.0 = '^r4.*'"),
        ({"schema.features.x": 'dtype = "flaot32"'}, "schema.features.x.dtype = 'flaot32'"),
        ({"schema.label": 'name = "y"\ndtype = "flaot32"'}, "schema.label.dtype = 'flaot32'"),
        ({"schema.label": 'nmae = "y"\nclasses = 10'}, "unknown key schema.label.nmae; the nearest known"),
        ({"model": 'factry = "my_model:build"'}, 'unknown key model.factry; the nearest known key is "factory"'),
        ({"storage": 'ulr = "s3://x"', "serving": "canary = 0.1"}, "unknown key storage.ulr; the nearest known"),
    ],
)
def test_one_fault_is_one_sentence(tmp_path, sections, sentence):
    """Neither the key that is missing for it, nor the default that is taken for it, makes a second one."""
    (fault,) = faults_of(tmp_path, sections)
    assert sentence in fault.sentence


def test_faults_of_their_own_are_all_named(tmp_path):
    found = faults_of(tmp_path, {"stream": 'topics = ["^r4.*"]\nlabls = 1', "model": ""})
    assert {fault.location for fault in found} == {("stream", "topics", "0"), ("stream", "labls"), ("model", "factory")}
