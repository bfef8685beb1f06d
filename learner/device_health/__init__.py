"""Watches the health of NVIDIA devices through NVML, and acts before a failing device costs training."""
