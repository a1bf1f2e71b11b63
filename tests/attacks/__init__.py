"""Attacks as programs: each prints what an attacker got before, and gets now."""
