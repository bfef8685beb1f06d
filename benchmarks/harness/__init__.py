"""What the benchmarks of this folder share: events, data sets, stores, peers, whole pipelines, turns and tables.

A script of this folder puts the folder at the end of `sys.path` before it imports anything else of the project: with
the folder in front, its `replay.py` would be taken for the package `replay`.
"""
