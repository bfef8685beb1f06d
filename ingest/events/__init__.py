"""Events: schema, encoders, identity, and the block that holds many events as columns."""
