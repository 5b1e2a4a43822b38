"""Kernels on a GPU against its own limits and against other kernels, in one command and a bounded time.

The limits are measured first, on the same card: the rate of a copy and of a matrix product. Then every time is a share
of one of them: a verify pass moves at least `bytes = tokens x KV heads x (D + D_v) x itemsize` and its bandwidth is
bytes / time; a prefill computes `4 D pairs` operations per query head. A wrong answer stops the run, a missing peer
does not, and what the time did not suffice for is listed. Results are on disk after each section; `report` judges
them.
"""
