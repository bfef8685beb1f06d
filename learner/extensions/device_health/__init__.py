"""The health of NVIDIA devices, read and judged: the learner ends before a failing one costs training."""
