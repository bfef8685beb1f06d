"""Compares the inputs and predictions of new events with those before, and names what has drifted."""
