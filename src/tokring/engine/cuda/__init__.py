"""The CUDA backend. device.py chooses and loads nothing of it; the rest is imported where CUDA was chosen."""
