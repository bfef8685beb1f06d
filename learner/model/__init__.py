"""The user's model: factory, task, embedding, device."""
