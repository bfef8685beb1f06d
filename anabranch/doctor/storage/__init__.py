"""The checks of what is stored on other hosts."""
