"""What an auditor asks of a version: whether it comes out again, and where it comes from."""
