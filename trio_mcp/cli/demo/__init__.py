"""The demo: ``python -m trio_mcp demo`` runs a server and a client, and shows their code.

`server` is the server, also a command for any host.  `scenes` has the actions of the client, whose lines are shown and
then run.  `tour` shows them in order.  The output is real: the values shown come from the server.
"""
