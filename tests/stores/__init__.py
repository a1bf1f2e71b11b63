"""Stores: one contract for all of them."""
