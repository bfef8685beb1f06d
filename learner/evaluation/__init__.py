"""How good the model is: prequential error, the holdout set, forgetting."""
