"""Protobuf schemas: from a registry's text or serialized descriptor to the fields that `[schema]` reads.

In: a writer schema, which comes from the network. Out: a message type with only the fields that are read. Promised: no
file is read and no program is run, whatever the schema holds.
"""
