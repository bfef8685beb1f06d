"""Modules that grow while they train: experts on a frozen model, and columns next to one.

In: a freshly built module, and weights with some number of parts. Out: a module of the same names, with a pool of the
parts, and a router that chooses one of them for each event. Frozen parts do not change any more.
"""
