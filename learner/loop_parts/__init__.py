"""Parts of the training loop: its state, its batches, and the steps and events that it leaves out."""
