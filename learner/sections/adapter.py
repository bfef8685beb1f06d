"""The section `[model.adapter]`. Imports no torch."""

import math
from typing import Annotated, Literal

from pydantic import Field

from anabranch.core.settings import Section


class AdapterSettings(Section):
    """Which parts of a pretrained model train. All others are frozen: they are stored once, and are in no version."""

    kind: Literal["lora"] = "lora"
    """`lora` adds to each layer of `targets` the product of two small matrices, which train. Needs the extra `hf`."""
    rank: Annotated[int, Field(ge=1, le=1024)] = 8
    """Inner size of the two matrices."""
    alpha: Annotated[float, Field(gt=0, lt=math.inf)] = 16.0
    """The product is scaled by `alpha / rank`."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Layers to adapt: names of modules or their ends, such as `query`, or `all-linear` for all linear layers outside
    `train`."""
    train: tuple[str, ...] = ()
    """Names of modules that train in full, such as `classifier`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of a layer's inputs that the adapter ignores in training."""
    base_precision: Literal["fp32", "bf16", "nf4"] = "fp32"
    """How frozen layers store their weights: `bf16` in 16 bits; `nf4` linear layers and embeddings in 4.5 bits (QLoRA),
    others as `bf16`. They compute in the precision of their input. `nf4` needs the extra `nf4`."""
