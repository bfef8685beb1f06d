"""Events that wait for labels that come late, and their join: in events and labels, out events with a decided fate."""
