"""A broker that gives an address which cannot be reached is an error that names it."""

import socket

from anabranch.ingest.kafka.diagnostics import unreachable_advertised


def test_the_address_that_cannot_be_reached_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        servers = f"127.0.0.1:{port}"
        assert unreachable_advertised(servers, [("127.0.0.1", port)]) is None
        sentence = unreachable_advertised(servers, [("127.0.0.1", port), ("kafka-internal.invalid", 9092)])
        assert sentence is not None
        assert sentence.startswith(
            f"the Kafka broker at {servers} gives kafka-internal.invalid:9092 as its address (advertised.listeners), "
        )
    assert unreachable_advertised(servers, [("kafka-internal.invalid", 9092)]) is None, "the broker itself is away"
