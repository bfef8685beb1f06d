"""The dashboard and its data."""
