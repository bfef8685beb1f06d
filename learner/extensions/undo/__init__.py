"""Takes events out of what was learned: returns to a checkpoint from before them, and skips them from then on."""
