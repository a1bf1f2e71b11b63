"""Attacks as programs.  Each one prints the effect of the attack in an earlier version and its effect now."""
