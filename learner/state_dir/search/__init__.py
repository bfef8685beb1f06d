"""What the search of `[search]` reports, and what a person orders of it."""
