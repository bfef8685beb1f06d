"""What a checkpoint holds of the store, and how it is restored."""
