"""What the search of `[search]` reports, and the file by which a person controls it."""
