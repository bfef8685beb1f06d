"""The installation, and the limits of the machine."""

import importlib
import platform
import resource
from collections.abc import Iterator
from operator import attrgetter

from anabranch.doctor.findings import CheckContext, Finding, found, ok
from ingest.backfill_settings import BackfillSettings
from ingest.registry_settings import REGISTRY_FORMATS

_EXTRAS = (
    ("client", "confluent", "confluent_kafka", "fast"),
    ("format", "arrow", "pyarrow", "arrow"),
    *(("format", name, "httpx", "registry") for name in REGISTRY_FORMATS),
    ("format", "avro", "fastavro", "registry"),
    ("format", "protobuf", "google.protobuf", "registry"),
    ("format", "json-schema", "jsonschema_rs", "registry"),
)
"""A key of `[stream]` and its value, the module that it needs, and the extra that brings it."""
_OPTIONAL = (
    ("tracing", "[tracing]", "opentelemetry.trace", "otel"),
    ("mlflow", "[mlflow]", "mlflow", "mlflow"),
    ("lineage.sign_key", "lineage.sign_key", "cryptography", "sign"),
)
"""A key that is None by default, its name in sentences, the module that it needs, and the extra that brings it."""
_FILES = 1024
"""File descriptors: what the parts need, and some hundred connections of serving."""


def check_install(context: CheckContext) -> Iterator[Finding]:
    """Check that what the config needs can be imported; torch is checked with the model, in a separate process."""
    faults = []
    if not _imports("crc32c"):
        faults.append(found("install.crc32c", "crc32c cannot be imported: without it Kafka is read 9 times slower."))
    stream = context.pipeline.pipeline.stream if context.pipeline else None
    for key, value, module, extra in _EXTRAS:
        if stream is not None and getattr(stream, key) == value and not _imports(module):
            message = f'stream.{key} = "{value}" needs {module}, which cannot be imported.'
            faults.append(found("install.extra", message, extra=extra))
    for module, extra in _modules_of(stream.backfill).items() if stream is not None and stream.backfill else ():
        if not _imports(module):
            message = f"[stream.backfill] needs {module}, which cannot be imported."
            faults.append(found("install.extra", message, extra=extra))
    if context.pipeline is not None and context.pipeline.pipeline.replay.redis is not None and not _imports("redis"):
        faults.append(found("install.extra", "replay.redis needs redis, which cannot be imported.", extra="redis"))
    for key, name, module, extra in _OPTIONAL:
        chosen = context.pipeline is not None and attrgetter(key)(context.pipeline.pipeline) is not None
        if chosen and not _imports(module):
            message = f"{name} needs {module}, which cannot be imported."
            faults.append(found("install.extra", message, extra=extra))
    yield from faults or [ok(f"Python {platform.python_version()} has what the config needs.")]


def _modules_of(backfill: BackfillSettings) -> dict[str, str]:
    """Return the modules that the history needs, with the extra that brings each."""
    away = any("://" in pattern and not pattern.startswith("file://") for pattern in backfill.files)
    return {"pyarrow": "arrow"} | ({"obstore": "storage"} if away else {})


def check_limits(context: CheckContext) -> Iterator[Finding]:
    """Whether enough files may be open."""
    del context
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _FILES:
        message = f"Only {limit} files may be open, so that serving refuses connections beyond about {limit // 2}."
        yield found("limit.files", message, needed=4 * _FILES)
    else:
        yield ok("Enough files may be open.")


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
