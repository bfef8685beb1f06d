"""What the benchmarks share: events, data sets, stores, peers, whole pipelines, interleaved arms and their results.

A benchmark is started as a module, `python -m benchmarks.replay`: if it is started as a file, its folder is first on
`sys.path`, and `replay.py` is taken for the package `replay`.
"""
