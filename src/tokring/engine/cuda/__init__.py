"""The CUDA backend. Nothing outside of this package imports it before a device was chosen; see device.py."""
