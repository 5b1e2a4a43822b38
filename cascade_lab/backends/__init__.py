"""Implementations of one attention pass behind `cascade_lab.attention`: plain torch, and Triton kernels.

Both take the same checked arguments and return the same `(o, lse)` state. Nothing is imported here, so that a machine
without Triton can load the torch backend.
"""
