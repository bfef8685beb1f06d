"""What the learner changes about itself: its response to drift, and how much it replays."""
