"""Kernels for paged attention, sampling and the layers around them: arrays in, arrays out."""
