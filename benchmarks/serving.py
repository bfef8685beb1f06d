"""Serving over HTTP: throughput, latency, swaps and device sharing. Each section is a module of the harness.

    python -m benchmarks.serving [--quick] [--json FILE] [--save] [--only PART ...]

    alone      throughput and latency of a server without other load; left out of the quick form, as is `peer`
    swaps      a thousand swaps under load: requests that fail, how much later the others are answered, memory
    base_swaps the same of a model that is frozen but for an adapter, and how large its versions are
    experts    latency with 20 experts over that of the same model without any
    grpc       latency of single rows over gRPC, over that of HTTP
    tracing    requests a second with 1 % of them traced, over those without tracing
    workers    throughput with two processes behind the port, over that with one; left out of the quick form too
    fleet      from a version's commit to an object store to its being served on another host
    peer       single rows a second over those of LitServe and Ray Serve, with the same model and batching
    freshness  from an event's append to a prediction by a version trained on it
    stream     messages answered from topic to topic over the model's own rate, and the latency that it adds to Kafka's
    log        requests a second with each answer logged in a topic, over those without the log
    device_sharing
               one core for learner and serving: how much later requests are answered while the learner trains, and how
               much training is kept

The docstring of each module, `harness/serving_<section>.py`, says how it measures. Latency is that of open-loop
load: arrival times are fixed in advance, and a request's time begins at its arrival whether or not it could be sent
then, so that queueing is not hidden.
"""

import argparse
import os
from types import ModuleType

from benchmarks.harness import (
    serving_alone,
    serving_base_swaps,
    serving_device_sharing,
    serving_experts,
    serving_fleet,
    serving_freshness,
    serving_grpc,
    serving_log,
    serving_peer,
    serving_stream,
    serving_swaps,
    serving_tracing,
    serving_workers,
)
from benchmarks.harness.pipeline import broker
from benchmarks.harness.results import Form, Results, options

SECTIONS: dict[str, ModuleType] = {
    "alone": serving_alone,
    "swaps": serving_swaps,
    "base_swaps": serving_base_swaps,
    "experts": serving_experts,
    "grpc": serving_grpc,
    "tracing": serving_tracing,
    "workers": serving_workers,
    "fleet": serving_fleet,
    "peer": serving_peer,
    "freshness": serving_freshness,
    "stream": serving_stream,
    "log": serving_log,
    "device_sharing": serving_device_sharing,
}
"""Each has `TARGETS`, and `measure(results, form, bootstrap)`."""
_QUICK = ["swaps", "experts", "grpc", "tracing", "fleet", "freshness", "stream", "log", "device_sharing"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, SECTIONS)
    parser.add_argument(
        "--bootstrap", metavar="HOST:PORT", help="a broker, where topics are left, instead of an embedded one"
    )
    chosen = parser.parse_args()
    targets = {key: target for section in SECTIONS.values() for key, target in section.TARGETS.items()}
    results = Results("serving", targets)
    results.fact("quick", chosen.form is not Form.LONG)
    with broker(chosen.bootstrap) as bootstrap:
        for name in chosen.only or (_QUICK if chosen.form is Form.QUICK else SECTIONS):
            results.fact(f"load_before_{name}", os.getloadavg()[0])
            SECTIONS[name].measure(results, chosen.form, bootstrap)
    results.write(chosen)


if __name__ == "__main__":
    main()
