"""Measures the loader, the exchange and the grouping: what `odb bench` prints.

Numbers that people compare are ratios of medians or medians of ratios taken within one run, the
arms alternating, as the same machine is seldom equally fast twice.
"""
