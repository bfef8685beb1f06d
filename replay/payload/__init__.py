"""Distributes the payload of held events among tiers: writes, reads, caches and erases rows."""
