"""Where the payload of held events is stored: device memory, Redis, disk."""
