"""Message formats: bytes of a message to columns of events, and a reason for each that is refused."""
