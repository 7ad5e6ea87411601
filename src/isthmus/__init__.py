"""Isthmus: the fastest way to train on the machines you have."""

__version__ = "0.1.0"
