"""`anabranch plan`: what a pipeline takes of a machine at a load.

In: the settings, a load, and constants that the reports of a pipeline show, or the model alone. Out: lines, each with
its value, its unit and the formula that it comes from, and the promises that the plan breaks.
"""
