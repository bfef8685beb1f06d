"""The HTTP server: routes, tokens, connections, bounds."""
