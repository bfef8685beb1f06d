"""The command line: arguments and help."""
