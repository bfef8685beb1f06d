"""The sections `[stream]` and `[schema]` of `pipeline.toml`."""
