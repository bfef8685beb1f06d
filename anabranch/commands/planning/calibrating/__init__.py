"""The calibration: the user's pipeline on synthetic events, without a broker, and what is measured of it.

In: the settings and a load. Out: constants. Promised: nothing outside a temporary folder is written.
"""
