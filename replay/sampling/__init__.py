"""Which held events are sampled."""
