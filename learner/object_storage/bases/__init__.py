"""Bases in an object store: uploaded before what names them, and fetched once for a host."""
