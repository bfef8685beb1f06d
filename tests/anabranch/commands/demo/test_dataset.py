"""The demo's stream."""

import json
from itertools import islice

import numpy as np
import pytest

from anabranch.commands.demo.dataset import CLASSES, MALFORMED_EVERY, load_digits, messages, vary
from anabranch.config.loader import load_config
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat


@pytest.fixture(scope="module")
def digits():
    return load_digits(0)


@pytest.fixture(scope="module")
def stream(digits):
    return list(messages(digits, 0, 6_000))


def test_images_are_in_range_and_those_for_requests_are_never_streamed(digits):
    for pixels in (digits.stream_pixels, digits.request_pixels):
        assert (pixels.dtype, pixels.shape[1], pixels.min(), pixels.max()) == (np.float32, 64, 0, 1)
    assert len(digits.stream_labels) + len(digits.request_labels) == 1797
    assert set(digits.request_labels.tolist()) == set(range(CLASSES))


def test_the_same_seed_gives_the_same_stream_and_another_another(digits):
    first, again = (list(messages(digits, 3, 500)) for _ in range(2))
    assert first == again
    assert first != list(messages(digits, 4, 500))


@pytest.mark.slow
def test_the_classes_come_in_ten_phases_of_equal_length(stream):
    phases = [message.phase for message in stream]
    assert phases == sorted(phases)
    assert [phases.count(phase) for phase in range(CLASSES)] == [600] * CLASSES
    assert all(json.loads(message.value)["y"] == message.phase for message in stream if not message.malformed)


def test_a_short_stream_has_as_many_messages_as_were_asked_for(digits):
    assert [len(list(messages(digits, 0, events))) for events in (1, 7, 23)] == [1, 7, 23]


def test_without_an_end_it_goes_round(digits, monkeypatch):
    monkeypatch.setattr("anabranch.commands.demo.dataset.ENDLESS_PHASE", 20)
    phases = [message.phase for message in islice(messages(digits, 0, None), 10 * 20 + 1)]
    assert (phases[0], phases[20], phases[-2], phases[-1]) == (0, 1, 9, 0)


def test_a_stream_without_an_end_has_poisoned_phases_and_one_with_an_end_none(digits, monkeypatch):
    for name, value in (("FROM", 30), ("EVENTS", 10), ("EVERY", 50)):
        monkeypatch.setattr(f"anabranch.commands.demo.dataset.POISONED_{name}", value)
    endless = list(islice(messages(digits, 0, None), 100))
    assert [number for number, message in enumerate(endless) if message.poisoned] == [*range(30, 40), *range(80, 90)]
    assert not any(message.poisoned for message in messages(digits, 0, 100))
    clean = [json.loads(message.value)["y"] for message in endless if not message.poisoned]
    poisoned = [json.loads(message.value)["y"] for message in endless if message.poisoned]
    assert set(clean) == {0}
    assert set(poisoned) == {4, 9}


@pytest.mark.slow
def test_one_message_in_a_thousand_is_malformed_and_exactly_those_are_refused(stream, example):
    schema = Schema(load_config(example / "pipeline.toml", {}).pipeline.events)
    decoded = JsonFormat(schema).decode([message.value for message in stream])
    malformed = [i for i, message in enumerate(stream) if message.malformed]
    assert len(malformed) == len(stream) // MALFORMED_EVERY
    assert [reject.message for reject in decoded.rejects] == malformed
    assert len({reject.reason for reject in decoded.rejects}) == len(malformed)


def test_messages_are_small_and_pixels_in_range(stream):
    assert max(len(message.value) for message in stream) < 600
    assert all(0 <= value <= 1 for m in stream[:200] for value in json.loads(m.value)["x"])


def test_an_image_is_varied_by_shift_and_noise_but_stays_alike(digits):
    rng = np.random.default_rng(0)
    image = digits.stream_pixels[0]
    varied = [vary(image, rng) for _ in range(50)]
    assert len({one.tobytes() for one in varied}) == 50
    assert min(np.abs(one - image).mean() for one in varied) < 0.06
    assert all(one.shape == (64,) and one.dtype == np.float32 for one in varied)
