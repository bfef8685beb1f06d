"""History: files that are read before the topics. Lists them, reads their rows in columns, and says when they end."""
