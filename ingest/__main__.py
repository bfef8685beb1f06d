"""`python -m ingest --connection FD --ring FD`: the ingest process, started by the learner and not by hand."""

import argparse
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from ingest.assembler import Assembler
from ingest.block import BlockLayout
from ingest.clients import CLIENTS
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import AnabranchError, SettingsError
from ingest.messages import Begin, Failed, receive_in_ingest, send
from ingest.ring import Ring
from ingest.schema import Schema
from ingest.worker import StoppedError, Worker


def main() -> int:
    """Serve one learner until it says stop or is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connection", type=int, required=True)
    parser.add_argument("--ring", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    # Ctrl-C, and the SIGTERM of many a service manager, reach the whole group; the learner decides when ingest ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(arguments.connection)
    begin = receive_in_ingest(connection)
    assert isinstance(begin, Begin)
    stream = StreamSettings.model_validate_json(begin.stream)
    schema = Schema(SchemaSettings.model_validate_json(begin.schema))
    try:
        client = CLIENTS[stream.client](stream)
    except SettingsError as exc:
        send(connection, Failed(type(exc).__name__, str(exc)))
        return 0
    try:
        assembler = Assembler(schema, stream, HoldOut.model_validate_json(begin.hold_out))
        ring = Ring(BlockLayout(schema), int(stream.buffer_bytes), arguments.ring)
        Worker(stream, client, assembler, ring, connection).run(begin.positions, begin.marks)
    except (StoppedError, BrokenPipeError, ConnectionError):
        return 0
    except AnabranchError as exc:
        send(connection, Failed(type(exc).__name__, str(exc)))
        return 0
    finally:
        client.close()
    return 0


if __name__ == "__main__":
    # A producer thread of the Kafka client may still wait for a broker that is away; nothing is lost by leaving it.
    code = main()
    sys.stderr.flush()
    os._exit(code)
