"""An MCP server on standard input and output that runs on asyncio, without Trio: python examples/asyncio_stdio.py

The `Connection` does the protocol, for both eras.  `main` moves the bytes.  `Handlers` runs one asyncio task for each
call of a session; its `flush` writes the messages that the session has queued.
"""

import asyncio
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial

from asyncio_tools import OFFER, result_of

from trio_mcp.core.connection import Connection
from trio_mcp.core.errors import INTERNAL_ERROR, RequestError
from trio_mcp.core.messages import Event, Id, JsonObject
from trio_mcp.core.requests import RequestCancelled
from trio_mcp.core.session import Call, ServerProtocol


class Handlers:
    def __init__(self, session: Connection[ServerProtocol] | ServerProtocol, flush: Callable[[], None]) -> None:
        self.session, self.flush = session, flush
        self.running: dict[Id, asyncio.Task[JsonObject]] = {}

    def handle(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Call):
                task = self.running[event.request.id] = asyncio.create_task(result_of(event.request, self.progress))
                task.add_done_callback(partial(self.finish, event.request.id))
            elif isinstance(event, RequestCancelled):
                self.running[event.id].cancel()
        self.flush()

    def progress(self, id: Id, done: int, total: int) -> None:
        self.session.progress(id, done, total)
        self.flush()

    def finish(self, id: Id, task: asyncio.Task[JsonObject]) -> None:
        del self.running[id]
        error = RequestError(INTERNAL_ERROR, "cancelled") if task.cancelled() else task.exception()
        if error is None:
            self.session.answer(id, task.result())
        elif isinstance(error, RequestError):
            self.session.refuse(id, error)  # nothing is sent for a cancelled call
        else:
            traceback.print_exception(error)  # for the log only: its text may contain secrets
            self.session.refuse(id, RequestError(INTERNAL_ERROR, "the tool failed"))
        self.flush()


async def main() -> None:
    wire = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # `print` writes to standard error: only messages may reach the client
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _ = await loop.connect_write_pipe(lambda: protocol, wire)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    connection = Connection(ServerProtocol(OFFER))
    handlers = Handlers(connection, lambda: writer.write(connection.data_to_send()))
    while data := await reader.read(65536):
        connection.receive_data(data)
        handlers.handle(connection.events())
        await writer.drain()  # reads no more requests until the client reads its responses
    connection.receive_eof()
    handlers.handle(connection.events())
    if handlers.running:
        await asyncio.wait(handlers.running.values(), timeout=1.0)  # the client may still read the answers
    connection.connection_lost()
    handlers.handle(connection.events())
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
