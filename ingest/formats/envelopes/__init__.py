"""What messages are wrapped in. In: values and headers of messages. Out: the values within, for the message format."""
