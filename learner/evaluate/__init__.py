"""How well the model does: on new events, on held-out ones, over time; and what the learner changes in response."""
