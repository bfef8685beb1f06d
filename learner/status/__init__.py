"""What the learner says about itself: its report, its metrics, and the address where it is asked."""
