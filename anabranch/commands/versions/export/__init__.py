"""What `versions export` writes."""
