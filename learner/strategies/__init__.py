"""Continual-learning methods, one class each."""
