"""How blocks travel from the ingest process to the learner: shared memory, a socket, TCP."""
