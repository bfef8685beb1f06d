"""What an event is: schema, encoders, identity, and the block that holds many as columns."""
