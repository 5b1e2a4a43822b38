"""Triton kernels and their launches. Only the modules that hold kernels import Triton; `config` does not."""
