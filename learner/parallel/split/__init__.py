"""One model over several ranks: in, a full model; out, this rank's part, whose names are unchanged."""
