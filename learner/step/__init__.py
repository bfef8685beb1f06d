"""One step of the loop, and what it is made of: batches, replay, state, and the events that it leaves out."""
