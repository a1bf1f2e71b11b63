"""The protocol without I/O: no clock, no tasks, no randomness, no logging, no event loop.

Bytes come in by `jsonrpc`, messages go through a `session`, and what happened comes back as events.  Nothing is
imported here, so that a program pays only for the parts it names.

An id in a comment, such as core-32, is a row of tests/requirements.tsv: the sentence of the specification obeyed there.
"""
