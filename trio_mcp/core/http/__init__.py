"""HTTP without sockets: messages, fields, event streams, WebSocket frames, and the rules of both roles."""
