"""`python -m anabranch.ingest --connection FD --ring FD`: the ingest process, which the learner starts."""

import argparse
import contextlib
import os
import signal
import sys
from multiprocessing.connection import Connection

from pydantic import ValidationError

from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.core.logs import LogSettings, add_log_options, configure_logging
from anabranch.ingest.backfill.build import history_of
from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.events.hold_out import shuffle_seed
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.registry import CLIENTS
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import Begin, Failed, receive_in_ingest, send
from anabranch.ingest.transport.shared_ring import SharedRing
from anabranch.ingest.worker.block_builder import BlockBuilder
from anabranch.ingest.worker.decoding_limits import DecodingLimits
from anabranch.ingest.worker.worker import IngestWorker, StoppedError


def main() -> int:
    """Serve one learner until it sends `Stop` or is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connection", type=int)
    parser.add_argument("--ring", type=int)
    add_log_options(parser)
    arguments = parser.parse_args()
    configure_logging(LogSettings(arguments.log_level, arguments.log_format))
    # Ctrl-C, and the SIGTERM of many a service manager, reach the whole group; the learner decides when ingest ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(arguments.connection)
    try:
        message = receive_in_ingest(connection)
    except EOFError:
        return 0
    if not isinstance(message, Begin):
        return 0  # the learner ended before it began
    sys.path += [folder for folder in message.path if folder not in sys.path]
    try:
        stream = StreamSettings.model_validate_json(message.stream)
        schema = Schema(SchemaSettings.model_validate_json(message.schema), stream.labels)
        shared = SharedRing(BlockLayout(schema), int(stream.buffer_bytes), arguments.ring)
    except ValidationError as exc:  # of a module that is imported for the first time in this process
        send(connection, Failed(SettingsError.__name__, exc.errors()[0]["msg"].removeprefix("Value error, ")))
        return 0
    except SettingsError as exc:
        send(connection, Failed(type(exc).__name__, str(exc)))
        return 0
    _read(connection, message, stream, schema, shared)
    return 0


def _read(connection: Connection, begin: Begin, stream: StreamSettings, schema: Schema, ring: SharedRing) -> None:
    """Read for a learner until it sends `Stop` or is gone; send it `Failed` on an error."""
    with contextlib.ExitStack() as stack:
        try:
            client = CLIENTS[stream.client](stream)
            stack.callback(client.close)
            hold_out = HoldOut.model_validate_json(begin.hold_out)
            assembler = BlockBuilder(schema, stream, hold_out, writer_schemas(stream), traced=begin.traced)
            history = history_of(stream, schema, shuffle_seed(hold_out))
            if history is not None:
                stack.callback(history.close)
            worker = IngestWorker(
                stream,
                client,
                assembler,
                ring,
                connection,
                history=history,
                limits=DecodingLimits(ring.mark, begin.suspects, begin.refused, has_limit=True),
                read_only=begin.read_only,
            )
            worker.run(begin.positions, begin.marks)
        except (StoppedError, BrokenPipeError, ConnectionError):
            pass
        except AnabranchError as exc:
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                send(connection, Failed(type(exc).__name__, str(exc)))


if __name__ == "__main__":
    # A producer thread of the Kafka client may still wait for a broker that is away; nothing is lost by leaving it.
    code = main()
    sys.stderr.flush()
    os._exit(code)
