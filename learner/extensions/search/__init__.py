"""Live search. The same new and old events as the model's come in; settings, and weights trained with them, go out.

A challenger starts from the model's weights and trains on each event that the model trains on, for as long as its lease
lasts. Without a promotion the model's weights are those without a search, bit for bit.
"""
