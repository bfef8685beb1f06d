"""The runs of a backtest: a run takes events as columns, trains a model on them, and keeps the score of each batch."""
