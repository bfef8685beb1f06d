"""Files of events in; records out, one at a time: JSON lines, CSV and Parquet."""
