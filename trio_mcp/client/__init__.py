"""The client: opening a session, requests, callbacks, subscriptions, HTTP and WebSocket."""
