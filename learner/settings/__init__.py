"""The sections of `pipeline.toml` that the learner reads, by file. They import no torch."""
