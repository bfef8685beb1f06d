"""The formats whose messages need nothing but the schema to be read."""

from anabranch.ingest.formats.base import Format
from anabranch.ingest.formats.registry import format_class
from anabranch.ingest.settings import formats
from anabranch.ingest.settings.formats import REGISTRY_FORMATS

FORMATS: dict[str, type[Format]] = {
    name: format_class(name) for name in formats.FORMATS if name not in REGISTRY_FORMATS
}
