"""Sections of `pipeline.toml` within `[model]`, by file. They import no torch, and `learner.config` composes them."""
