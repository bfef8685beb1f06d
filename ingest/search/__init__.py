"""Finds messages in the topics for a command.

In come the settings of the stream and what to find; out go offsets. Joins no consumer group, and writes nothing.
"""
