"""Triton kernels and their launches. Importing this package imports Triton in the mode chosen by `runtime`."""

from cascade_lab import runtime

runtime.require_triton()
