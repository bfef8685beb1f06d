"""Kafka clients behind one contract, the producer, and the inspector of topics."""
