"""Theorems about the functions in `spec`, for every world size.

No theorem is here yet. What is checked so far, and how, is in the README's table of promises.
"""
