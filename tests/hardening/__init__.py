"""Attacks, mistakes of handlers and broken peers: each ends only its own call or its own connection."""
