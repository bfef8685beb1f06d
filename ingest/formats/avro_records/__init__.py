"""Avro: parses writer schemas, applies the reader's rules, and decodes records to columns or one by one."""
