"""A client and a server talking without any I/O: every line that would cross the wire, for one client of each era.

python examples/two_eras.py
"""

from __future__ import annotations

from trio_mcp.core.jsonrpc import Event, Limits, decode, encode
from trio_mcp.core.opening import ClientProtocol
from trio_mcp.core.outcomes import Answered
from trio_mcp.core.revisions import LATEST, LATEST_LEGACY, Revision
from trio_mcp.core.session import Call, Offer, ServerProtocol, SessionProtocol

LIMITS = Limits()


def carry(sender: SessionProtocol, receiver: SessionProtocol, arrow: str) -> list[Event]:
    """Take everything the sender has to say to the receiver, as bytes, and return what happened there."""
    events: list[Event] = []
    for message, _ in sender.outgoing():
        line = encode(message)
        print(arrow, line.decode())
        events += receiver.receive(decode(line, LIMITS), now=0.0)
    return events


def talk(revision: Revision) -> None:
    print(f"\nA client of {revision}:")
    server = ServerProtocol(Offer({"name": "greeter", "version": "1.0"}, {"tools": {}}))
    client = ClientProtocol(Offer({"name": "visitor", "version": "1.0"}, revisions=(revision,)))
    client.open()
    while not client.opened:
        carry(client, server, "->")
        carry(server, client, "<-")
    if client.negotiation is not None:
        print(f"   agreed on {client.negotiation.chosen}: {client.negotiation.why}")

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
