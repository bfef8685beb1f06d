"""`anabranch plan`: what a pipeline takes of a machine, before it runs there.

In: the settings, a load, and constants that a short run of this pipeline on synthetic events measured. Out: lines, each
with its value, its unit and the formula that it comes from, and the promises that the plan breaks.
"""
