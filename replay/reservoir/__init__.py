"""Which events are held: the hash reservoir and the event table."""
