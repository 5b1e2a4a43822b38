"""Measurements with a clock, and what the kernels become when compiled: the rows of `cascade-lab bench`."""
