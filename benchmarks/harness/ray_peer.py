"""`python ray_peer.py PORT FACTORY ARGS MAX_BATCH MAX_DELAY`: Ray Serve as its documentation advises, with a model
of the benchmarks: one replica, batches of the same size and delay, the same answer."""

import json
import signal
import sys
import tempfile
from typing import Any

import models
import ray
import torch
from ray import serve
from starlette.requests import Request


def model_of(factory: str, args: str, max_batch: int, max_delay: float) -> serve.Application:
    """Return the classifier as an application."""

    @serve.deployment(max_ongoing_requests=2 * max_batch)  # type: ignore[untyped-decorator]
    class Model:
        def __init__(self) -> None:
            torch.set_num_threads(1)
            self.model = getattr(models, factory)(**json.loads(args)).eval()

        @serve.batch(max_batch_size=max_batch, batch_wait_timeout_s=max_delay)  # type: ignore[untyped-decorator]
        async def predict(self, rows: list[list[float]]) -> list[dict[str, Any]]:
            with torch.inference_mode():
                output = torch.softmax(self.model(torch.tensor(rows)), dim=1)
            classes = output.argmax(1).tolist()
            return [
                {"prediction": one, "probabilities": all_} for one, all_ in zip(classes, output.tolist(), strict=True)
            ]

        async def __call__(self, request: Request) -> dict[str, Any]:
            answer: dict[str, Any] = await self.predict((await request.json())["x"])
            return answer

    application: serve.Application = Model.bind()
    return application


def main(port: int, factory: str, args: str, max_batch: int, max_delay: float) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=4,  # slots for its own actors, not cores
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(model_of(factory, args, max_batch, max_delay), route_prefix="/predict")
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
