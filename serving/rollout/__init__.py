"""Which version is served: eligibility, commands, the hot swap."""
