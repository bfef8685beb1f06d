"""The Open Inference Protocol v2: bytes to arrays and back."""
