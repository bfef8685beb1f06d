"""Steps in which the model raises on events, or memory runs out on a rank: which events, and what other ranks do."""
