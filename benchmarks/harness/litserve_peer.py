"""`python litserve_peer.py PORT FACTORY ARGS MAX_BATCH MAX_DELAY`: LitServe as its documentation advises, with a model
of the benchmarks: one worker, batches of the same size and delay, the same answer."""

import json
import sys
from typing import Any

import litserve
import models
import torch


class Api(litserve.LitAPI):  # type: ignore[misc]
    """A classifier."""

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.model = getattr(models, sys.argv[2])(**json.loads(sys.argv[3])).eval().to(device)

    def decode_request(self, request: dict[str, Any]) -> torch.Tensor:
        return torch.tensor(request["x"])

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return torch.softmax(self.model(x), dim=1)

    def unbatch(self, output: torch.Tensor) -> list[torch.Tensor]:
        return list(output)

    def encode_response(self, output: torch.Tensor) -> dict[str, Any]:
        return {"prediction": int(output.argmax()), "probabilities": output.tolist()}


if __name__ == "__main__":
    api = Api(max_batch_size=int(sys.argv[4]), batch_timeout=float(sys.argv[5]))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[1]), num_api_servers=1, log_level="warning", generate_client_file=False
    )
