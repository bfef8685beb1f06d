"""What the loop can run without: a folder for each, whose door `extension.py` is imported by the assembly alone."""
