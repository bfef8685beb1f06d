"""What held-out events take in a checkpoint."""

from anabranch.commands.planning.constants import Constants
from anabranch.commands.planning.store_size import schema_row_bytes
from anabranch.config.model import Pipeline
from ingest.events.schema import Schema

_BYTES = 36
"""Bytes of a held-out event in a checkpoint, without its row."""


def held_out_bytes(pipeline: Pipeline, constants: Constants) -> int:
    """Return the bytes of a held-out event in a checkpoint; without a store its row has the fields of the schema."""
    row = constants.row_bytes or schema_row_bytes(Schema(pipeline.events, pipeline.stream.labels))
    return row + _BYTES
