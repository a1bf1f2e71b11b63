"""The server: what an author registers, how requests are dispatched, and how a process serves."""
