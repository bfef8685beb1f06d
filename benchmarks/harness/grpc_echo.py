"""`python -m benchmarks.harness.grpc_echo`: answers `ModelInfer` with a constant, to see what gRPC alone takes.

It prints its port, and serves until its stdin ends.
"""

import asyncio
import sys

import grpc
import numpy as np

from anabranch.serving.grpc.messages import MESSAGES, SERVICE
from anabranch.serving.protocol.tensors import write_binary

_CLASSES = 10


async def main() -> None:
    """Serve."""
    reply = MESSAGES["ModelInferResponse"](model_name="benchmark", model_version="1")
    reply.outputs.add(name="prediction", datatype="FP32", shape=[1, _CLASSES])
    reply.raw_output_contents.append(write_binary(np.zeros((1, _CLASSES), np.float32)))
    constant = reply.SerializeToString()

    async def answer(_body: bytes, _context: object) -> bytes:
        return constant

    server = grpc.aio.server()
    calls = {"ModelInfer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
