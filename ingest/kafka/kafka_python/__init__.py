"""The client `kafka-python`."""
