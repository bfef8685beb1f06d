"""Process plumbing: background worker, shutdown, status server, heartbeat, profiler."""
