"""The section `[stream.registry]`: the Schema Registry that has the writer schemas of the messages."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.settings import BearerToken, Section, http_address


class RegistrySettings(Section):
    """Where the schemas of `avro`, `protobuf` and `json-schema` messages are: Confluent's API, which Karapace, Redpanda
    and Apicurio have too."""

    url: Annotated[str, http_address("the registry's address", "https://registry:8081", "user and password")]
    """Address of the registry, without credentials, such as `https://registry:8081`."""
    subject: Annotated[str, Field(min_length=1)] | None = None
    """Subject of the messages; by default the first topic's name with `-value` after it."""
    user: str | None = None
    """User for HTTP basic authentication, or the API key; with `password`."""
    password: SecretStr | None = None
    """Password of the user, or the API secret."""
    token: BearerToken | None = None
    """Bearer token, instead of user and password."""
    ca: Path | None = None
    """PEM file of the authorities for the registry's certificate, relative to the config's folder."""
    timeout: PositiveDuration = timedelta(seconds=5)
    """Longest wait for an answer; then the registry counts as away."""
    fallback: bool = False
    """Whether messages without the id of a schema are read with the newest schema of `subject`."""

    @model_validator(mode="after")
    def _one_kind_of_credentials(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise ValueError("user and password go together")
        if self.token is not None and self.user is not None:
            raise ValueError("set token, or user and password, not both")
        return self
