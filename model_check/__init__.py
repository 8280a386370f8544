"""Checks the protocol in `spec` by running it: its promises, and all epochs of a small scope."""
