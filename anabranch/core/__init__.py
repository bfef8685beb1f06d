"""What all packages need, and imports none of them: errors, durations, back-off, addresses, files."""
