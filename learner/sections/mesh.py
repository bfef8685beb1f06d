"""The section `[learner.mesh]`: how ranks are arranged to train one model. Imports no torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from anabranch.core.settings import Section


class MeshSettings(Section):
    """How ranks are arranged to train one model: their number is the product of the dimensions."""

    data: Annotated[int, Field(ge=1)] = 1
    """Ranks that train on different events, each on `learner.batch_size` new ones a step."""
    tensor: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the modules of `model.parallel` and get the same events. They are on one host."""
    pipeline: Annotated[int, Field(ge=1)] = 1
    """Ranks that each run some of the model's layers, one after the other."""
    expert: Annotated[int, Field(ge=1)] = 1
    """Ranks that each have some of the model's experts, and train on different events too."""
    shard: Annotated[int, Field(ge=2)] | None = None
    """With `learner.sharding = "fsdp"`: ranks of `data` that shard the weights together; the others have copies of the
    shards. Absent: the ranks of a host if there are several, else all."""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor * self.pipeline * self.expert

    @model_validator(mode="after")
    def _shards_divide_the_data(self) -> Self:
        if self.shard is not None and self.data % self.shard:
            raise ValueError(f"shard = {self.shard} does not divide data = {self.data}; take a divisor of it")
        return self
