"""The state of a pipeline in an object store: `[storage]`."""
