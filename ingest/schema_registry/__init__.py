"""The Schema Registry: which schema wrote a message.

In: values and headers of messages. Out: the id of each message's writer schema, and the schema with what it refers to.
Promised: a schema is fetched once; credentials are sent to the configured host alone.
"""
