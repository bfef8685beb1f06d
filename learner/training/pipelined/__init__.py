"""The passes of a step, and the search for events that raise, where a model is divided into stages."""
