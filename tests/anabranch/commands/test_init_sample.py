"""`anabranch init --from`: a pipeline that fits the events of a file, whatever its format."""

import csv
import json
import math
import random
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anabranch import cli
from anabranch.commands.backtest.measure import run_backtest
from anabranch.commands.backtest.rows import EventsOfFile
from anabranch.commands.event_files.files import open_source
from anabranch.commands.init.command import write_sampled
from anabranch.commands.init.sample import _columns, _described, _identifiers, sample_of_file, sampled_pipeline
from anabranch.commands.versions.export.program import ServedProgram, _traced
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import build_model, check_model, make_task, sample
from anabranch.learner.model.features.learned import FeatureLearning

LABEL = "returned"


def orders(rows=400):
    r = random.Random(3)
    for number in range(rows):
        amount, country = round(r.lognormvariate(3, 1), 2), r.choice(["CH", "DE", "FR"])
        yield {
            "order_id": f"o-{number:05}",
            "customer-id": r.randrange(40),
            "country": country,
            "merchant": f"m{r.randrange(35)}",
            "amount": amount,
            "discount": None if number % 9 == 0 else r.random(),
            "express": number % 2 == 0,
            "placed.at": (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number)).isoformat(),
            "currency": "EUR",
            LABEL: int((amount > 20) != (country == "DE")),
        }


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    times = [{**row, "placed.at": datetime.fromisoformat(row["placed.at"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(times), path)


FORMATS = {"jsonl": write_jsonl, "csv": write_csv, "parquet": write_parquet}


@pytest.fixture
def file(tmp_path, request):
    path = tmp_path / f"orders.{getattr(request, 'param', 'jsonl')}"
    FORMATS[path.suffix[1:]](path, list(orders()))
    return path


def loaded(file, label=LABEL, **options):
    paths, remarks = write_sampled(file.parent / "pipe", sample_of_file(file), label, **options)
    return load_config(paths[0], {}), remarks


@pytest.mark.parametrize("file", FORMATS, indirect=True)
def test_each_field_becomes_what_its_values_are(file):
    config, remarks = loaded(file)
    events = config.pipeline.events
    assert {name: (each.dtype, each.scale, each.missing, each.cycles) for name, each in events.features.items()} == {
        "country": ("string", None, None, ()),
        "merchant": ("string", None, None, ()),
        "amount": ("float32", "standard", None, ()),
        "discount": ("float32", "standard", "indicator", ()),
        "express": ("bool", None, None, ()),
        "placed_at": ("float64", None, None, ("day", "week")),
    }
    assert events.features["country"].encode.vocab == ("CH", "DE", "FR")
    assert events.features["merchant"].encode.learn == 128
    assert (events.label.name, events.label.classes) == (LABEL, 2)
    assert (events.key.name, events.key.field) == ("customer_id", "customer-id")
    assert (events.time.name, events.time.field) == ("placed_at", ("placed.at",))
    assert [remark.split('"')[1] for remark in remarks] == ["order_id", "currency"]
    text = config.path.read_text()
    assert "# 3 different texts: categories" in text
    assert "# 35 different texts: rows of a table that grows" in text


@pytest.mark.slow
@pytest.mark.parametrize("file", FORMATS, indirect=True)
def test_the_model_fits_the_schema_and_all_events_can_be_used(file, monkeypatch):
    config, _ = loaded(file)
    pipeline, schema = config.pipeline, Schema(config.pipeline.events)
    monkeypatch.syspath_prepend(str(config.folder))
    cpu, task = torch.device("cpu"), make_task(pipeline.model.task)
    model = build_model(pipeline.model.factory, pipeline.model.args, config.folder)
    model = FeatureLearning().convert(model, ModelContext(cpu, schema)).eval()
    assert check_model(model, task, schema, cpu) == (2,)
    names = [feature.name for feature in schema.features]
    program, rows = ServedProgram(model, task, names, None), [sample(schema, count, cpu) for count in (3, 5)]
    traced = _traced(program, list(rows[0].values()), 1).module()
    for features in rows:
        answers = zip(traced(*features.values()).values(), program(*features.values()).values(), strict=True)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in answers)
    with open_source(file, None, None, schema, checked=True) as source:
        assert not [record.fault for record in source if record.fault]


@pytest.mark.slow
def test_formats_give_the_same_backtest(tmp_path):
    found = set()
    for suffix, write in FORMATS.items():
        path = tmp_path / suffix / f"orders.{suffix}"
        path.parent.mkdir()
        write(path, list(orders()))
        config, _ = loaded(path)
        result = run_backtest(config.pipeline, EventsOfFile(path))
        assert (result.skipped, result.events + result.held_out) == (0, 400)
        found.add(tuple((point.events, point.overall, point.loss) for point in result.points))
    assert len(found) == 1


def test_fields_in_objects_and_envelopes_are_found(tmp_path):
    file = tmp_path / "changes.jsonl"
    rows = [{"id": n // 4, "cost": {"net": n / 7}, "flag": n % 3 == 0} for n in range(60)]
    write_jsonl(file, [{"op": "c", "before": None, "after": row, "ts_ms": n} for n, row in enumerate(rows)])
    config, _ = loaded(file, "flag")
    stream, events = config.pipeline.stream, config.pipeline.events
    assert stream.envelope == "debezium"
    assert events.features["net"].field == "cost.net"
    assert events.key.name == "id"
    with open_source(file, None, None, Schema(events), checked=True, envelope=stream.envelope) as source:
        decoded = JsonFormat(Schema(events)).decode([record.content for record in source])
    assert not decoded.rejects
    assert decoded.columns["feature.net"].tolist() == pytest.approx([row["cost"]["net"] for row in rows])


class TestColumns:
    def described(self, values, label=None):
        rows = [{"c": value, "y": label[n] if label else n % 2} for n, value in enumerate(values)]
        column, target = _columns(rows)
        return _described(column, _identifiers([column])[column.path], target)

    @pytest.mark.parametrize(
        ("values", "why"),
        [
            ([None] * 30, "no row has a value"),
            ([1, "a"] * 15, "several types"),
            (["EUR"] * 30, "it is 'EUR' in each row"),
            (list(range(30)), "it numbers the rows"),
            ([f"k{n}" for n in range(30)], "it is an id"),
            ([[1], [1, 2]] * 15, "of several lengths"),
            ([f"a sentence of many words, the {n % 9}th of all that there are" for n in range(30)], "it is a text"),
            (["yes", "no"] * 15, "seems to be known after it"),
            ([10**400 + n % 3 for n in range(30)], "larger than any float"),
        ],
    )
    def test_what_is_no_feature_says_why(self, values, why):
        assert why in self.described(values).why

    @pytest.mark.parametrize(("unit", "by"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
    def test_numbers_of_times_have_their_unit(self, unit, by):
        rows = [{"created": (1_700_000_000 + 3600 * n) * by, "y": n % 2} for n in range(30)]
        column, target = _columns(rows)
        field = _described(column, "created", target)
        assert (field.unit, field.cycles) == (unit, ("day",))

    def test_a_number_next_to_a_target_of_different_numbers_is_a_feature(self):
        prices = random.Random(1).sample(range(10**6), 60)
        assert self.described([price / 7 for price in prices], prices).dtype == "float32"

    def test_no_name_is_the_mark_of_a_missing_value_of_another(self):
        for row in ({"a": 1, "a_missing": 2, "y": 0}, {"a_missing": 2, "a": 1, "y": 0}):
            names = {*_identifiers(_columns([row, row])).values()}
            assert len(names) == 3
            assert not names & {f"{name}_missing" for name in names}

    def test_a_number_that_is_the_same_so_far_is_a_feature(self):
        field = self.described([0.42] * 30)
        assert (field.dtype, field.scale, field.comment) == ("float32", "standard", "0.42 in each row so far")

    def test_a_number_that_is_not_finite_is_missing(self):
        field = self.described([math.inf, -math.inf, math.nan, *(n / 7 for n in range(30))])
        assert field.missing == "indicator"
        assert field.comment == "numbers from 0 to 4.143, half of them up to 2.071, and 3 rows have none"

    def test_numbers_with_a_heavy_tail_are_scaled_by_rank(self):
        assert self.described([n % 5 for n in range(400)] + [1e9]).scale == "quantile"

    def test_columns_of_one_list_are_one_feature(self):
        (x, y) = _columns([{"x.0": n, "x.1": n + 0.5, "x.2": 1, "y": 1} for n in range(3)])
        assert (x.path, x.values[1]) == (("x",), [1, 1.5, 1])
        assert y.path == ("y",)

    @given(
        st.lists(
            st.dictionaries(
                st.text(max_size=4),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
                    max_leaves=4,
                ),
                max_size=4,
            ),
            max_size=6,
        )
    )
    def test_any_events_have_a_description(self, rows):
        columns = _columns(rows)
        names = _identifiers(columns)
        assert len(set(names.values())) == len(columns)
        for column in columns:
            assert _described(column, names[column.path], columns[0]).name


class TestRefusals:
    def test_an_unknown_label_names_the_fields(self, file):
        with pytest.raises(SettingsError, match=r"--label price is no field of .*, which has order_id, customer-id"):
            loaded(file, "price")

    def test_without_a_label_the_fields_are_named(self, file, capsys, monkeypatch):
        monkeypatch.setattr("sys.stdin.isatty", lambda: False)
        assert cli.main(["init", str(file.parent / "p"), "--from", str(file)]) == 2
        assert "name the field to predict with --label: one of order_id" in capsys.readouterr().err

    def test_a_label_of_lists_and_numbers_is_none(self, tmp_path):
        write_jsonl(tmp_path / "mixed.jsonl", [{"x": n / 3, "y": [1] if n % 2 else 1} for n in range(30)])
        with pytest.raises(SettingsError, match="the label y has"):
            loaded(tmp_path / "mixed.jsonl", "y")

    def test_a_label_of_many_texts_is_none(self, file):
        file.write_text("".join(json.dumps({"a": n, "b": f"t{n}"}) + "\n" for n in range(2000)))
        with pytest.raises(SettingsError, match="the label b has 2000 classes, not 2 to 1000"):
            loaded(file, "b")

    def test_sources_exclude_each_other(self, file, capsys):
        arguments = ["init", str(file.parent / "p"), "--from", str(file), "--history", "x", "--label", "y"]
        assert cli.main(arguments) == 2
        assert "--from and --history exclude each other" in capsys.readouterr().err

    @pytest.mark.parametrize("content", ["", "[1]\n", "{\n", "not json\n"])
    def test_a_file_without_events_is_one_sentence(self, tmp_path, content):
        file = tmp_path / "e.jsonl"
        file.write_text(content)
        with pytest.raises(SettingsError):
            sampled_pipeline(tmp_path / "p", sample_of_file(file), "y")
