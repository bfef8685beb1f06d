"""What is on the device and for which purpose, and how copies of it reach the host."""
