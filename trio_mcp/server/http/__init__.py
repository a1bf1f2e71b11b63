"""A server over HTTP: listener, connections, sessions, responses, WebSocket, ASGI."""
