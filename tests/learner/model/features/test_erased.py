"""What is learned from the events of one person alone goes with them; what others have had too stays."""

from typing import Any

import numpy as np
import torch

from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.features.intercept import GroupIntercept, residual_of
from anabranch.learner.model.features.learned import LearnedFeatures
from anabranch.learner.model.features.numbers import LearnedNumber, QuantileSketch, empty_sketches
from anabranch.learner.model.features.vocabulary import VocabularyTable
from anabranch.learner.model.task import Classification

SECRET_VALUE = 4.74242
FLAT, SHOP = 1007, 5
KEYS = hash_texts([b"customer-%d" % number for number in range(60)])


def learned_of(**scale):
    encode = {"learn": 256, "min_count": 2}
    features = {
        "x": {"dtype": "float32", **scale},
        "flat": {"dtype": "int64", "encode": encode},
        "shop": {"dtype": "int64", "encode": encode},
        "group": {"dtype": "int64", "encode": encode, "intercept": True},
    }
    both = {"of": ["flat", "shop"], "encode": encode}
    settings = {"features": features, "cross": {"both": both}, "label": {"name": "y", "classes": 2}}
    learned = LearnedFeatures(Schema(SchemaSettings.model_validate(settings)))
    learned.secret = 2**100 + 3
    return learned


def observe(learned, people, random):
    who = np.array(people)
    columns: dict[str, Any] = {"key_hash": KEYS[who], "time_ms": np.ones(len(who), np.int64)}
    columns["feature.x"] = np.where(who == 7, SECRET_VALUE, random.normal(size=len(who))).astype(np.float32)
    columns |= {"feature.flat": 1000 + who, "feature.group": 2000 + who, "feature.shop": np.full(len(who), SHOP)}
    columns |= {"label": (who == 7).astype(np.int64), "weight": np.ones(len(who), np.float32)}
    output = torch.zeros(len(who), 2)
    learned.observe(columns, residual_of(Classification(), output, torch.from_numpy(columns["label"])))


def lived(**scale):
    learned, random = learned_of(**scale), np.random.default_rng(0)
    for _ in range(60):
        observe(learned, [*random.integers(8, 60, 30).tolist(), 7], random)
    return learned


def has(learned, value):
    tensors = learned.state_dict().items()
    return [name for name, each in tensors if each.is_floating_point() and (each - value).abs().lt(1e-3).any()]


def test_rows_of_one_person_alone_are_gone_and_those_of_several_stay():
    learned = lived()
    table, group = learned.of(VocabularyTable)["flat"], learned.of(GroupIntercept)["group"]
    own = {
        name: int(each(torch.tensor([FLAT]))[0])
        for name, each in (("flat", table), ("shop", learned.of(VocabularyTable)["shop"]))
    }
    assert own["flat"] >= table.shared
    assert group(torch.tensor([2007])).abs().min() > 0.1
    row = int(group.table(torch.tensor([2007]))[0])
    assert group.get_buffer("information")[row].all()
    others = {name: each(torch.arange(1008, 1060)) for name, each in learned.of(VocabularyTable).items()}
    found = learned.erase(learned.owners_of(KEYS[[7]]), seed=1)
    assert set(found) == {"flat", "both"}
    assert found["flat"].rows.tolist() == [own["flat"]]
    assert table(torch.tensor([FLAT])).tolist() == found["flat"].shared.tolist()
    assert FLAT not in table.get_buffer("keys").tolist()
    assert 2007 not in group.table.get_buffer("keys").tolist()
    assert not group(torch.tensor([2007])).any()
    assert not group.get_buffer("information")[row].any()
    assert int(learned.of(VocabularyTable)["shop"](torch.tensor([SHOP]))[0]) >= table.shared
    tables = learned.of(VocabularyTable)
    assert all(torch.equal(each(torch.arange(1008, 1060)), others[name]) for name, each in tables.items())


def test_an_erased_row_is_free_for_another_value_and_the_person_may_come_back():
    learned = lived()
    (row,) = learned.erase(learned.owners_of(KEYS[[7]]), seed=1)["flat"].rows.tolist()
    random = np.random.default_rng(3)
    for _ in range(3):
        observe(learned, [7, 7], random)
    assert int(learned.of(VocabularyTable)["flat"](torch.tensor([FLAT]))[0]) == row
    assert learned.erase(learned.owners_of(KEYS[[7]]), seed=1)["flat"].rows.tolist() == [row]


def test_owners_do_not_show_keys():
    learned = lived()
    owners = learned.of(VocabularyTable)["flat"].state["owner"]
    assert len(np.unique(owners)) > 40
    assert not np.isin(owners.view(np.uint64), KEYS).any()


def test_a_value_of_one_person_leaves_the_sketch_and_ranks_stay():
    learned = lived(scale="quantile")
    assert has(learned, SECRET_VALUE)
    values = torch.linspace(-2, 2, 41)
    before = learned.of(LearnedNumber)["x"](values)["x"]
    learned.erase(learned.owners_of(KEYS[[7]]), seed=1)
    assert has(learned, SECRET_VALUE) == []
    assert (learned.of(LearnedNumber)["x"](values)["x"] - before).abs().max() < 0.03


def test_a_sketch_keeps_values_that_many_events_have():
    arrays = [each[0] for each in empty_sketches(1)]
    sketch = QuantileSketch(*arrays)
    sketch.add(np.random.default_rng(0).permutation(np.append(np.zeros(900), np.arange(1, 101))).astype(np.float64))
    sketch.blur(np.random.default_rng(1))
    assert sketch.quantiles(np.array([0.2, 0.5, 0.8])).tolist() == [0, 0, 0]
    found = arrays[0][:, :][arrays[0] != 0]
    assert not np.isin(found, np.arange(1, 101)).any()


def test_the_first_values_of_a_number_are_gone_too():
    learned, random = learned_of(scale="standard"), np.random.default_rng(0)
    observe(learned, [7, 8, 9], random)
    assert "feature_x.state.first" in has(learned, SECRET_VALUE)
    learned.erase(learned.owners_of(KEYS[[7]]), seed=1)
    assert has(learned, SECRET_VALUE) == []
