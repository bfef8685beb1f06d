"""Versions that served, as model versions of an MLflow registry: registered in the background, each once."""
