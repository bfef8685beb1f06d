"""What `init --from` writes is as accurate as a pipeline that is made by hand, and what it learned can be exported."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.api.learner import Learner
from anabranch.api.schema import Schema
from anabranch.commands.backtest.measure import run_backtest
from anabranch.commands.backtest.rows import EventsOfFile
from anabranch.commands.init.command import write_sampled
from anabranch.commands.init.sample import sample_of_file
from anabranch.commands.versions.export.program import ServedProgram, _traced
from anabranch.config.loader import load_config
from anabranch.learner.model.factory import build_model, make_task, sample

EXAMPLE = Path(__file__).parents[3] / "examples" / "tabular"
pytestmark = pytest.mark.slow
PRICES = """
name = "prices"
[stream]
topics = ["prices"]
[schema.features.num]
dtype = "float32"
shape = [4]
[schema.label]
name = "up"
classes = 2
[model]
factory = "benchmarks.harness.models:tabular"
args = {{middle = {middle}, scale = {scale}, categories = []}}
[learner]
strategy = "er"
batch_size = 10
replay_ratio = "auto"
optimizer = {{name = "sgd", lr = 0.1}}
[replay]
capacity = 500
"""


def orders(rows):
    made = runpy.run_path(str(EXAMPLE / "make_events.py"))["orders"]()
    return [row for row, _ in zip(made, range(rows), strict=False)]


def prices(rows):
    """Numbers of different sizes that say whether a price rises; one is constant at first, and decides later."""
    random = np.random.default_rng(5)
    link_from, price = rows // 2, 50.0
    for number in range(rows):
        demand, link = random.normal(4000, 900), 0.42 if number < link_from else random.uniform(0.3, 0.55)
        hour = number % 48 / 48
        pull = (demand - 4000) / 900 + np.sin(6.3 * hour) - 12 * (link - 0.42) * (number >= link_from)
        up = bool(pull + 0.1 * (50 - price) + random.normal(0, 0.4) > 0)
        price += random.exponential(1.0) * (1 if up else -1) + 0.1 * (50 - price)
        yield {"price": price, "demand": demand, "link": link, "hour": hour, "up": int(up)}


def written(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def accuracy(config, file):
    sys.modules.pop("my_model", None)  # two pipelines of one process have one of that name
    return run_backtest(load_config(config, {}).pipeline, EventsOfFile(file)).points[-1].overall


def by_init(file, label):
    paths, _ = write_sampled(file.parent / "pipe", sample_of_file(file), label)
    return paths[0]


def test_orders_are_learned_as_by_the_example(tmp_path):
    file, by_hand = written(tmp_path / "e.jsonl", orders(3000)), tmp_path / "pipeline.toml"
    by_hand.write_text((EXAMPLE / "pipeline.toml").read_text().replace("my_model:build", "model_by_hand:build"))
    shutil.copyfile(EXAMPLE / "my_model.py", tmp_path / "model_by_hand.py")
    assert accuracy(by_init(file, "outcome"), file) > accuracy(by_hand, file) - 0.01


def test_numbers_are_learned_as_by_scales_and_settings_chosen_by_hand(tmp_path):
    rows = list(prices(3000))
    numbers = [[row[name] for name in ("price", "demand", "link", "hour")] for row in rows]
    first = np.array(numbers[:1000])
    by_hand = tmp_path / "pipeline.toml"
    by_hand.write_text(PRICES.format(middle=first.mean(axis=0).tolist(), scale=(first.std(axis=0) + 1e-3).tolist()))
    same = written(tmp_path / "num.jsonl", [{"num": n, "up": row["up"]} for n, row in zip(numbers, rows, strict=True)])
    file = written(tmp_path / "e.jsonl", rows)
    assert accuracy(by_init(file, "up"), file) > accuracy(by_hand, same) - 0.01


@pytest.mark.parametrize(("made", "label"), [(orders, "outcome"), (prices, "up")])
def test_what_was_learned_answers_the_same_when_it_is_exported(tmp_path, made, label):
    rows = list(made(400))
    config = load_config(by_init(written(tmp_path / "e.jsonl", rows), label), {})
    sys.modules.pop("my_model", None)
    schema = Schema(config.pipeline.events)
    model = build_model(config.pipeline.model.factory, config.pipeline.model.args, config.folder)
    with Learner(model, schema, settings={"learner": {"batch_size": 20}}) as learner:
        learner.learn({name: [row.get(name) for row in rows] for name in rows[0]})
        learned = learner.model.eval()
    cpu, names = torch.device("cpu"), [feature.name for feature in schema.features]
    program = ServedProgram(learned, make_task("classification"), names, None)
    examples = [sample(schema, count, cpu) for count in (3, 5)]
    traced = _traced(program, list(examples[0].values()), 1).module()
    for features in examples:
        answers = zip(traced(*features.values()).values(), program(*features.values()).values(), strict=True)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in answers)
