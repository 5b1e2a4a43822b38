"""Limits of time in tests: far beyond what any machine takes, so that only what hangs meets them."""

# what takes seconds has hung after this many
HANGS_S = 300
# what takes half a minute has hung after this many
HANGS_LONG_S = 1800
