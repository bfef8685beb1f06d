"""A broker of one endless partition, which has messages of a file again and again, for a calibration.

Run as a module, it prints its port, and ends when its stdin does. What a consumer asks for while it reads is answered:
so the sockets, and the waiting for an answer, are those of a topic. No answer waits for more messages.
"""

import argparse
import bisect
import os
import socketserver
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from kafka.protocol.consumer import FetchRequest, FetchResponse, ListOffsetsRequest, ListOffsetsResponse
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse
from kafka.record import MemoryRecordsBuilder
from typing_extensions import override

HOST = "127.0.0.1"
END = 2**62
"""The end of the partition."""
_BATCH_BYTES = 16_384
"""Size of a record batch: what producers take by default."""
_MAGIC = 2
_SIZE, _OFFSET, _HEADER = struct.Struct(">i"), struct.Struct(">q"), struct.Struct(">hhi")
_COUNT_AT = 57
"""Where a record batch has the number of its records."""
_UNSUPPORTED_VERSION = 35
_FIRST = -2
"""The time that asks for the first offset."""
_VERSIONS: Mapping[Any, tuple[int, int]] = {
    ApiVersionsRequest: (0, 3),
    MetadataRequest: (4, 9),
    ListOffsetsRequest: (1, 5),
    FetchRequest: (4, 11),
}
"""The oldest and newest version of each request; newer ones have the id of a topic instead of its name."""


def record_batches(values: Sequence[bytes]) -> Sequence[bytes]:
    """Return messages as record batches, as large as those of a producer."""
    batches, builder = list[bytes](), None
    for value in values:
        if builder is None or builder.append(timestamp=0, key=None, value=value) is None:
            if builder is not None:
                builder.close()
                batches.append(bytes(builder.buffer()))
            builder = MemoryRecordsBuilder(_MAGIC, 0, max(_BATCH_BYTES, 2 * len(value)))
            builder.append(timestamp=0, key=None, value=value)
    assert builder is not None
    builder.close()
    return [*batches, bytes(builder.buffer())]


class EndlessLog:
    """The record batches of some messages, again and again, from offset 0 on."""

    def __init__(self, values: Sequence[bytes]) -> None:
        """Take the messages."""
        self._batches = record_batches(values)
        counts = [_SIZE.unpack_from(batch, _COUNT_AT)[0] for batch in self._batches]
        *self._begins, self._length = accumulate(counts, initial=0)

    def read(self, offset: int, most_bytes: int) -> bytes:
        """Return batches from the one with `offset` on, of at most `most_bytes`, but one at least."""
        turn, within = divmod(offset, self._length)
        index, parts, size = bisect.bisect_right(self._begins, within) - 1, list[bytes](), 0
        while not parts or size + len(self._batches[index]) <= most_bytes:
            batch = self._batches[index]
            parts += [_OFFSET.pack(turn * self._length + self._begins[index]), batch[_OFFSET.size :]]
            size += len(batch)
            turn, index = (turn, index + 1) if index + 1 < len(self._batches) else (turn + 1, 0)
        return b"".join(parts)


class Answers:
    """Answers requests; each topic has one partition, which is the log."""

    def __init__(self, log: EndlessLog, topics: Sequence[str], port: int) -> None:
        """Take the log, the topics, and the port of this broker."""
        self._log, self._topics, self._port = log, topics, port

    def to(self, frame: bytes) -> bytes | None:
        """Return the answer to a request with its size before it; None to one of another kind or version."""
        key, version, correlation = _HEADER.unpack_from(frame)
        kind = next((each for each in _VERSIONS if key == each.API_KEY), None)
        if kind is None:
            return None
        least, most = _VERSIONS[kind]
        if kind is ApiVersionsRequest:
            response = self._versions(_UNSUPPORTED_VERSION if version > most else 0)
            version = 0 if version > most else version
        elif not least <= version <= most:
            return None
        else:
            request = kind.decode(frame, version=version, header=True)
            made = {MetadataRequest: self._metadata, ListOffsetsRequest: self._offsets, FetchRequest: self._fetched}
            response = made[kind](request)
        response.API_VERSION = version
        response.with_header(correlation_id=correlation)
        return bytes(response.encode(header=True, framed=True))

    def _versions(self, error: int) -> Any:
        keys = [
            ApiVersionsResponse.ApiVersion(api_key=kind.API_KEY, min_version=least, max_version=most)
            for kind, (least, most) in _VERSIONS.items()
        ]
        return ApiVersionsResponse(error_code=error, api_keys=keys, throttle_time_ms=0)

    def _metadata(self, _request: Any) -> Any:
        kind = MetadataResponse.MetadataResponseTopic
        partition = {"error_code": 0, "partition_index": 0, "leader_id": 0, "leader_epoch": 0}
        copies = {"replica_nodes": [0], "isr_nodes": [0], "offline_replicas": []}
        topics = [
            kind(
                error_code=0,
                name=name,
                is_internal=False,
                partitions=[kind.MetadataResponsePartition(**partition, **copies)],
            )
            for name in self._topics
        ]
        broker = MetadataResponse.MetadataResponseBroker(node_id=0, host=HOST, port=self._port, rack=None)
        return MetadataResponse(
            throttle_time_ms=0, brokers=[broker], cluster_id="synthetic", controller_id=0, topics=topics
        )

    def _offsets(self, request: Any) -> Any:
        kind = ListOffsetsResponse.ListOffsetsTopicResponse
        topics = [
            kind(
                name=topic.name,
                partitions=[
                    kind.ListOffsetsPartitionResponse(
                        partition_index=each.partition_index,
                        error_code=0,
                        timestamp=-1,
                        offset=0 if each.timestamp == _FIRST else END,
                        leader_epoch=0,
                    )
                    for each in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return ListOffsetsResponse(throttle_time_ms=0, topics=topics)

    def _fetched(self, request: Any) -> Any:
        kind = FetchResponse.FetchableTopicResponse
        topics = [
            kind(
                topic=topic.topic,
                partitions=[
                    kind.PartitionData(
                        partition_index=each.partition,
                        error_code=0,
                        high_watermark=END,
                        last_stable_offset=END,
                        log_start_offset=0,
                        aborted_transactions=[],
                        preferred_read_replica=-1,
                        records=self._log.read(each.fetch_offset, min(request.max_bytes, each.partition_max_bytes)),
                    )
                    for each in topic.partitions
                ],
            )
            for topic in request.topics
        ]
        return FetchResponse(throttle_time_ms=0, error_code=0, session_id=0, responses=topics)


def main() -> None:
    """Serve the messages of a file until the end of stdin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("messages", type=Path)
    parser.add_argument("topics", nargs="+")
    options = parser.parse_args()
    log = EndlessLog(msgspec.msgpack.decode(options.messages.read_bytes(), type=list[bytes]))

    class Connection(socketserver.StreamRequestHandler):
        @override
        def handle(self) -> None:
            answers = Answers(log, options.topics, port)
            while len(head := self.rfile.read(_SIZE.size)) == _SIZE.size:
                answer = answers.to(self.rfile.read(_SIZE.unpack(head)[0]))
                if answer is None:
                    return
                self.connection.sendall(answer)

    server = socketserver.ThreadingTCPServer((HOST, 0), Connection)
    server.daemon_threads = True
    port = int(server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
