"""Trio streams for both roles: nurseries, workers, writers, stdio, child processes, HTTP connections, paths."""
