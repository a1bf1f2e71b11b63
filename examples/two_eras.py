"""A client and a server that talk without I/O: it prints every line they exchange, for one client of each era.

python examples/two_eras.py
"""

from __future__ import annotations

from typing import Any

from trio_mcp.core.connection import Connection
from trio_mcp.core.messages import Event
from trio_mcp.core.opening import ClientProtocol
from trio_mcp.core.requests import Answered
from trio_mcp.core.revisions import LATEST, LATEST_LEGACY, Revision
from trio_mcp.core.session import Call, Offer, ServerProtocol


def carry(sender: Connection[Any], receiver: Connection[Any], arrow: str) -> list[Event]:
    """Carry the bytes of the sender to the receiver, and return the events there."""
    data = sender.data_to_send()
    for line in data.splitlines():
        print(arrow, line.decode())
    if data:
        receiver.receive_data(data)
    return receiver.events()


def talk(revision: Revision) -> None:
    print(f"\nA client of {revision}:")
    server = Connection(ServerProtocol(Offer({"name": "greeter", "version": "1.0"}, {"tools": {}})))
    client = Connection(ClientProtocol(Offer({"name": "visitor", "version": "1.0"}, revisions=(revision,))))
    client.session.open()
    while not client.session.opened:
        carry(client, server, "->")
        carry(server, client, "<-")
    if (negotiation := client.session.negotiation) is not None:
        print(f"   agreed on {negotiation.chosen}: {negotiation.why}")

    client.request("tools/call", {"name": "greet", "arguments": {"whom": "Trio"}})
    for event in carry(client, server, "->"):
        if isinstance(event, Call):
            whom = event.request.params["arguments"]["whom"]
            server.answer(event.request.id, {"content": [{"type": "text", "text": f"Hello, {whom}!"}]})
    for event in carry(server, client, "<-"):
        if isinstance(event, Answered):
            print(f"   the client has: {event.result['content'][0]['text']}")


if __name__ == "__main__":
    talk(LATEST_LEGACY)
    talk(LATEST)
