"""Curves of the learner, and versions that served, for a tracker of experiments: sent in the background."""
