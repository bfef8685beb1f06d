"""`pipeline.toml`: read, overridden, resolved, validated."""
