"""Attacks, mistakes of handlers and broken peers: each costs its own call or its own connection only."""
