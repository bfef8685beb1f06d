"""Message formats: turn the bytes of messages into columns of events, and give a reason for each refused event."""
