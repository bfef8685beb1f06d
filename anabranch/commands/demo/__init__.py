"""The whole pipeline on one machine, with embedded parts and real data.

In: nothing but what is installed, or the address of a broker.
Out: a line a second of what happens, the dashboard, and a JSON report.
Promised: it runs the example that `anabranch init` writes, unchanged, and leaves no process and no file behind.
"""
