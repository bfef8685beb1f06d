"""The client `confluent`: librdkafka, which fetches and parses in its own threads, without the GIL."""
