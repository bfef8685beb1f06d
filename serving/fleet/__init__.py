"""Servers on hosts without the learner's disk: versions and rollout commands through an object store."""
