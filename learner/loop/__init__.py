"""The loop: its rounds, what is learned in one, and its reports.

In: batches of the stream and samples of replay. Out: trained weights, what is due in checkpoints and versions, reports.
Promised: the effects of a round happen in the order that `TrainingLoop` numbers.
"""
