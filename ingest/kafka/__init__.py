"""Kafka clients behind one contract, the producer, and what is asked about topics."""
