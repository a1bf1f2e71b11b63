"""A model of two peers and the network between them, which plays the events of their requests in every order.

A `Plan` lists the requests and the events that may happen to each.  A `World` is the state of the model at one moment.
`World.moves` lists every event that can happen next.  `World.play` makes one of them happen, and compares the values
that the peers return, the events they report and the messages they send with the rules of the protocol.  The rules are
written here a second time, without a table.

`explore` plays every order of a plan.  It visits each distinct world once.  All that a rule depends on, past events
included, is part of the world.  So equal worlds have equal futures, and the number of orders that continue from a world
is the sum over its moves.  Worlds are compared by a digest of their whole content.  No order is left out, and no world
is played twice.  `play_script` plays one order, which is given as text.

The network: on a duplex the messages of each direction keep their order.  In a session each message to the server has
a POST of its own, so these arrive in any order, and the messages to the client keep the order of their stream.  An
exchange is like a session, with one server for each request.  A broken stream of a session is resumed, so its messages
are not lost.  On a duplex each side may end its own direction: messages that it sends afterwards are dropped, and the
other side learns of the end after all earlier messages.  A deadline may be noticed late: one move lets the time pass,
and the peer looks at the clock in another move or when the next message arrives.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterator

import attrs

from trio_mcp.core import (
    Answered,
    ConnectionLost,
    Error,
    Event,
    Id,
    InvalidAnswer,
    InvalidMessage,
    LinkKind,
    Message,
    Notification,
    Peer,
    ProgressReported,
    Refused,
    Request,
    RequestCancelled,
    RequestError,
    Response,
    Role,
    SubscriptionEnded,
    TimedOut,
)

CLIENT, SERVER = Role.CLIENT, Role.SERVER
DUPLEX, SESSION, EXCHANGE = LinkKind
PROGRESS, CANCELLED, MESSAGE = "notifications/progress", "notifications/cancelled", "notifications/message"
LISTEN = "subscriptions/listen"
UNCANCELLABLE = ("initialize", "server/discover")

Move = tuple[str, int]
"""A verb and the number of its object: the index of a request in the plan, the index of a peer in `World.peers`, the
index of a message in the queue to the server, or the request id of a stream to the client (0: the common stream)."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@attrs.frozen
class PlannedRequest:
    """One request: its sender (`by`), the request inside which it is sent, and the events that may happen to it.

    An answer is always possible.  `may` holds any of these other events: `progress` and `note` (notifications of its
    handler), `error`, `garble` (the answer is damaged on the way), `cancel` and `fail` (by its sender), `rogue` (a
    cancellation where the protocol forbids one, or a second one), `teardown` (the side that serves the request puts a
    cancellation on the wire without a call of its peer).
    """

    method: str = "tools/call"
    may: frozenset[str] = attrs.field(default="", converter=_words)
    by: Role = CLIENT
    inside: int | None = None
    deadline: float | None = None
    times: int = 1  # how often each of these may happen


@attrs.frozen
class Plan:
    """`losses` holds those of `stream`, `link` and `input` (one direction of a duplex) that may be lost.  With `lazy`,
    queued messages leave by a separate move."""

    link: LinkKind
    requests: tuple[PlannedRequest, ...]
    losses: frozenset[str] = attrs.field(default="", converter=_words)
    lazy: bool = False


@attrs.define(slots=False)
class Track:
    """The past events of one request."""

    id: int = 0  # 0 until the request is sent
    outcome: str = ""  # the outcome that its sender got
    received: bool = False
    stopped: bool = False  # its handler got the order to stop
    done: bool = False  # its handler has ended
    taken: bool = False  # the peer accepted the answer of the handler
    replied: bool = False  # the answer was put on the wire
    cancel_sent: bool = False  # the cancellation was put on the wire
    end_sent: bool = False  # the notice that the server ended the subscription was put on the wire
    broken: bool = False  # its stream is broken, or the client closed it
    moves_made: tuple[str, ...] = ()  # the moves so far that are counted

    @property
    def served(self) -> bool:
        return self.received and not self.stopped and not self.done


class RuleBroken(AssertionError):
    """A rule of the protocol was broken."""


def expect(holds: object, rule: str) -> None:
    if not holds:
        raise RuleBroken(rule)


class World:
    """The state of a plan at one moment."""

    def __init__(self, plan: Plan, frozen: bytes | None = None) -> None:
        self.plan = plan
        if frozen is not None:
            (
                self.peers, self.tracks, self.up, self.down, self.queued, self.now, self.cut_off,
                self.closing, self.closed,
            ) = pickle.loads(frozen)  # fmt: skip
            return
        # The client and the server.  On an exchange each request has a server of its own.
        servers = len(plan.requests) if plan.link is EXCHANGE else 1
        self.peers = [Peer(CLIENT, link=plan.link), *(Peer(SERVER, link=plan.link) for _ in range(servers))]
        self.tracks = [Track() for _ in plan.requests]
        self.up: list[Message] = []
        self.down: dict[Id, list[Message]] = {}
        self.queued: tuple[int, ...] = ()
        self.now = 0.0
        self.cut_off = False
        self.closing: tuple[int, ...] = ()  # the peers that have ended their own direction
        self.closed: tuple[int, ...] = ()  # the peers that know that the other one has ended its direction

    def freeze(self) -> bytes:
        lanes = {lane: self.down[lane] for lane in sorted(self.down) if self.down[lane]}
        parts = (
            self.peers, self.tracks, self.up, lanes, self.queued, self.now, self.cut_off, self.closing, self.closed,
        )  # fmt: skip
        for peer in self.peers:
            peer.next_deadline()  # removes the deadlines of finished requests
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.fast = True  # by value only: the identity of equal strings must not matter
        pickler.dump(parts)
        return buffer.getvalue()

    # The peers and the requests.

    def _place(self, index: int, role: Role) -> int:
        """The index of the peer that has this role for request `index`."""
        return 0 if role is CLIENT else index + 1 if self.plan.link is EXCHANGE else 1

    def _sender(self, index: int) -> int:
        return self._place(index, self.plan.requests[index].by)

    def _receiver(self, index: int) -> int:
        return self._place(index, self.plan.requests[index].by.other)

    def _made_by(self, place: int, id: object) -> int | None:
        return next((at for at, each in enumerate(self.tracks) if each.id == id and self._sender(at) == place), None)

    def _served_by(self, place: int, id: object) -> int | None:
        return next((at for at, each in enumerate(self.tracks) if each.id == id and self._receiver(at) == place), None)

    def _subject(self, message: Message) -> int | None:
        """The index of the request that a message of the client concerns, on an exchange."""
        return self._made_by(0, message.params["requestId"] if isinstance(message, Notification) else message.id)

    # The possible next events.

    def moves(self) -> list[Move]:
        moves = [(verb, index) for index in range(len(self.tracks)) for verb in self._moves_of(index)]
        moves += [("up", at) for at in range(len(self.up))][: 1 if self.plan.link is DUPLEX else None]
        moves += [("down", int(lane)) for lane, messages in self.down.items() if messages]
        moves += [("flush", place) for place in self.queued]
        for place, peer in enumerate(self.peers):
            if (due := peer.next_deadline()) is not None:
                moves.append(("tick" if due <= self.now else "clock", place))
            if self.cut_off and not peer.closed:
                moves.append(("lost", place))
        if "link" in self.plan.losses and not self.cut_off and any(track.id for track in self.tracks):
            moves.append(("cut", 0))
        if "input" in self.plan.losses and not self.cut_off and any(track.id for track in self.tracks):
            moves += [("close", place) for place in (0, 1) if place not in (*self.closing, *self.queued)]
            moves += [("end", place) for place in (0, 1) if self._can_learn_of_the_end(place)]
        return moves

    def _can_learn_of_the_end(self, place: int) -> bool:
        on_the_way = any(self.down.values()) if place == 0 else bool(self.up)
        return 1 - place in self.closing and place not in self.closed and not on_the_way

    def _moves_of(self, index: int) -> Iterator[str]:
        planned, track = self.plan.requests[index], self.tracks[index]
        if not track.id:
            sender = self._sender(index)
            silent = self.peers[sender].closed or sender in (*self.closing, *self.closed)
            if not silent and (planned.inside is None or self.tracks[planned.inside].served):
                yield "send"
            return
        left = [verb for verb in sorted(planned.may) if track.moves_made.count(verb) < planned.times]
        yield from (verb for verb in left if verb in ("cancel", "fail"))
        given_up = track.broken if self.plan.link is EXCHANGE else track.cancel_sent or planned.method in UNCANCELLABLE
        if "rogue" in left and given_up:
            yield "rogue"
        if track.received:
            yield from (verb for verb in left if verb in ("progress", "note", "teardown"))
            if not track.done:
                yield from ("answer", *(verb for verb in left if verb in ("error", "garble")))
        if "stream" in self.plan.losses and planned.by is CLIENT and not self.cut_off and not track.broken:
            yield "break"
        if "break" in track.moves_made and "client_loses" not in track.moves_made:
            yield "client_loses"
        if track.broken and track.received and "server_loses" not in track.moves_made:
            yield "server_loses"

    # One method for each verb: the event happens.

    def play(self, move: Move) -> World:
        verb, at = move
        getattr(self, "_" + verb)(at)
        return self

    def _record(self, index: int, verb: str) -> Track:
        track = self.tracks[index]
        track.moves_made = tuple(sorted((*track.moves_made, verb)))
        return track

    def _send(self, index: int) -> None:
        planned, place = self.plan.requests[index], self._sender(index)
        about = None if planned.inside is None else self.tracks[planned.inside].id
        self.tracks[index].id = self.peers[place].request(
            planned.method, deadline=planned.deadline, progress="progress" in planned.may, about=about
        )
        self._drain(place)

    def _cancel(self, index: int) -> None:
        track, place = self._record(index, "cancel"), self._sender(index)
        cancelled = self.peers[place].cancel(track.id, "enough")
        expect(cancelled == (not track.outcome), "cancel tells whether it came in time")
        if cancelled:
            self._ends(index, "Cancelled")
        self._drain(place)

    def _fail(self, index: int) -> None:
        """The sender learns that there will be no answer.  An answer that still arrives is late."""
        track, place = self._record(index, "fail"), self._sender(index)
        self._compare(
            self.peers[place].fail(track.id, "refused"), [(ConnectionLost, index)] if self._waits(index) else []
        )
        self._drain(place)

    def _progress(self, index: int) -> None:
        track, place = self._record(index, "progress"), self._receiver(index)
        sent = self.peers[place].progress(track.id, track.moves_made.count("progress"))
        expect(sent == track.served, "progress is sent while the request is served, and only then")
        self._drain(place)

    def _note(self, index: int) -> None:
        track, place = self._record(index, "note"), self._receiver(index)
        sent = self.peers[place].notify(MESSAGE, about=track.id)
        expect(sent == track.served, "a note is sent while its request is served, and only then")
        self._drain(place)

    def _answer(self, index: int, answer: Callable[[Peer, Id], bool] = lambda peer, id: peer.answer(id, {})) -> None:
        track, place = self.tracks[index], self._receiver(index)
        track.taken = answer(self.peers[place], track.id)
        expect(track.taken != track.stopped, "an answer is taken unless the handler was told to stop")
        track.done = True
        self._drain(place)

    def _error(self, index: int) -> None:
        self._record(index, "error")
        self._answer(index, lambda peer, id: peer.refuse(id, RequestError(-32603, "no")))

    def _garble(self, index: int) -> None:
        self._record(index, "garble")
        self._answer(index)

    def _rogue(self, index: int) -> None:
        self._travel(self._sender(index), Notification(CANCELLED, {"requestId": self._record(index, "rogue").id}), None)

    def _teardown(self, index: int) -> None:
        id = self._record(index, "teardown").id
        self._travel(self._receiver(index), Notification(CANCELLED, {"requestId": id}), id)

    def _break(self, index: int) -> None:
        track = self._record(index, "break")
        track.broken = True
        if self.plan.link is EXCHANGE:  # its messages are lost; a session sends them again
            self.up = [message for message in self.up if self._subject(message) != index]
            self.down.pop(track.id, None)

    def _client_loses(self, index: int) -> None:
        """The client notices that the stream is broken."""
        track = self._record(index, "client_loses")
        lost = self.plan.link is EXCHANGE and not track.outcome
        self._lose_stream(0, track, [(ConnectionLost, index)] if lost else [])

    def _server_loses(self, index: int) -> None:
        """The server notices that the stream is broken, or that the client closed it."""
        track = self._record(index, "server_loses")
        stops = self.plan.link is EXCHANGE and track.served
        self._lose_stream(self._place(index, SERVER), track, [(RequestCancelled, index)] if stops else [])

    def _lose_stream(self, place: int, track: Track, expected_events: list[tuple[type, int]]) -> None:
        before = pickle.dumps(self.peers[place])
        self._compare(self.peers[place].connection_lost(about=track.id), expected_events)
        if not expected_events:
            expect(pickle.dumps(self.peers[place]) == before, "a lost stream that ends nothing changes nothing")
        self._drain(place)

    def _cut(self, _: int) -> None:
        self.cut_off = True
        self.up.clear()
        self.down.clear()

    def _lost(self, place: int) -> None:
        by_id = sorted(range(len(self.tracks)), key=lambda at: self.tracks[at].id)
        expected_events = [(ConnectionLost, at) for at in by_id if self._sender(at) == place and self._waits(at)]
        expected_events += [
            (RequestCancelled, at) for at in by_id if self._receiver(at) == place and self.tracks[at].served
        ]
        events = self.peers[place].connection_lost()  # in any order
        self._compare(sorted(events, key=lambda event: (type(event) is not ConnectionLost, event.id)), expected_events)
        self._drain(place)

    def _close(self, place: int) -> None:
        self.closing = tuple(sorted((*self.closing, place)))

    def _end(self, place: int) -> None:
        """The requests that wait for an answer fail.  The requests that are served continue."""
        self.closed = tuple(sorted((*self.closed, place)))
        lost = [at for at in range(len(self.tracks)) if self._sender(at) == place and self._waits(at)]
        lost.sort(key=lambda at: self.tracks[at].id)
        self._compare(self.peers[place].input_ended(), [(ConnectionLost, at) for at in lost])
        self._drain(place)

    def _clock(self, place: int) -> None:
        """Time passes, but no peer looks at the clock yet."""
        self.now = self.peers[place].next_deadline() or 0

    def _tick(self, place: int) -> None:
        self._compare(self.peers[place].tick(self.now), self._due(place))
        self._drain(place)

    def _up(self, at: int) -> None:
        message = self.up.pop(at)
        self._receive(self._place(self._subject(message), SERVER) if self.plan.link is EXCHANGE else 1, message)

    def _down(self, lane: int) -> None:
        self._receive(0, self.down[lane].pop(0))

    def _flush(self, place: int) -> None:
        self.queued = tuple(each for each in self.queued if each != place)
        for message, about in self.peers[place].outgoing():
            self._check_outgoing(place, message, about)
            self._travel(place, message, about)

    # The consequences of an event.

    def _drain(self, place: int) -> None:
        peer, tracks = self.peers[place], list(enumerate(self.tracks))
        waiting = sum(self._sender(at) == place and self._waits(at) for at, _ in tracks)
        serving = sum(self._receiver(at) == place and each.received and not each.done for at, each in tracks)
        expect(
            (peer.waiting, peer.serving) == (waiting, serving),
            "the counters have exactly the requests that have not ended",
        )
        if self.plan.lazy:
            self.queued = tuple(sorted({*self.queued, place}))
        else:
            self._flush(place)

    def _travel(self, place: int, message: Message, about: Id | None) -> None:
        if self.cut_off or place in self.closing:
            return
        if place == 0:
            at = self._served_by(0, getattr(message, "id", None))
            to = self.up
        else:
            at = self._served_by(place, about)
            to = self.down.setdefault(0 if about is None or self.plan.link is DUPLEX else about, [])
        if at is not None and self.plan.link is EXCHANGE and "break" in self.tracks[at].moves_made:
            return
        if at is not None and isinstance(message, Response) and "garble" in self.tracks[at].moves_made:
            message = InvalidMessage("spoilt", answers=message.id)
        to.append(message)

    def _receive(self, place: int, message: Message) -> None:
        expected_events = self._due(place)
        late = [index for _, index in expected_events]
        expected_events += [each for each in self._expected(place, message) if each[1] not in late]
        self._compare(self.peers[place].receive(message, self.now), expected_events)
        self._drain(place)

    def _compare(self, events: list[Event], expected_events: list[tuple[type, int]]) -> None:
        """Compare the reported events with the expected ones, then record these."""
        expected = [(kind, self.tracks[index].id if index >= 0 else None) for kind, index in expected_events]
        found = [(type(event), getattr(event, "id", None)) for event in events]
        expect(found == expected, f"expected {expected}, got {events}")
        for kind, index in expected_events:
            if kind is Request:
                self.tracks[index].received = True
            elif kind is RequestCancelled:
                self.tracks[index].stopped = True
            elif kind is not Notification and kind is not ProgressReported:
                self._ends(index, kind.__name__)

    def _ends(self, index: int, outcome: str) -> None:
        track = self.tracks[index]
        expect(not track.outcome, f"one outcome for each request, not {track.outcome} and {outcome}")
        track.outcome = outcome
        if self.plan.link is EXCHANGE and outcome in ("Cancelled", "TimedOut"):
            track.broken = True  # the client closes the stream, and the server learns of the outcome by that

    # The rules.

    def _waits(self, index: int) -> bool:
        return bool(self.tracks[index].id) and not self.tracks[index].outcome

    def _due(self, place: int) -> list[tuple[type, int]]:
        """The timeouts that are due: they happen before any other event."""
        due = [
            (planned.deadline, index)
            for index, planned in enumerate(self.plan.requests)
            if self._sender(index) == place
            and self._waits(index)
            and planned.deadline is not None
            and planned.deadline <= self.now
        ]
        return [(TimedOut, index) for _, index in sorted(due)]

    def _expected(self, place: int, message: Message) -> list[tuple[type, int]]:
        """The events that a message causes.  Never a protocol error, since both peers obey the protocol."""
        match message:
            case Request(id):
                return [(Request, self._served_by(place, id))]
            case Response(id) | Error(id) | InvalidMessage(answers=id):
                kind = {Response: Answered, Error: Refused, InvalidMessage: InvalidAnswer}[type(message)]
                index = self._made_by(place, id)
                return [(kind, index)] if self._waits(index) else []
            case Notification("notifications/progress", {"progressToken": token}):
                index = self._made_by(place, token)
                return [(ProgressReported, index)] if self._waits(index) else []
            case Notification("notifications/cancelled", {"requestId": id}):
                return self._expected_after_cancel(place, id)
        return [(Notification, -1)]

    def _expected_after_cancel(self, place: int, id: Id) -> list[tuple[type, int]]:
        index = self._served_by(place, id)
        if index is not None and self.tracks[index].received and not self.tracks[index].done:
            stops = self.tracks[index].served and not self._is_fixed(index)
            return [(RequestCancelled, index)] if stops else []
        index = self._made_by(place, id)
        if index is not None and self._waits(index) and self.plan.requests[index].method == LISTEN:
            return [(SubscriptionEnded, index)]
        return []

    def _is_fixed(self, index: int) -> bool:
        """The request is never cancelled, except by its stream, on links with a stream for each request."""
        return self.plan.requests[index].method in UNCANCELLABLE and self.plan.link is not EXCHANGE

    def _check_outgoing(self, place: int, message: Message, about: Id | None) -> None:
        """A message is put on the wire: check that it is allowed at this moment."""
        if isinstance(message, Request):
            return
        if isinstance(message, Notification) and message.method == CANCELLED:
            self._check_outgoing_cancel(place, message.params["requestId"], about)
            return
        track = self.tracks[self._served_by(place, about)]
        expect(not track.stopped, "nothing is sent for a request once its cancellation was seen")
        expect(not track.replied, "nothing is sent for a request after its answer")
        if isinstance(message, Response | Error):
            expect(message.id == track.id, "an answer has the id of its request")
            track.replied = True
        elif message.method == PROGRESS:
            expect(message.params["progressToken"] == track.id, "progress goes by the token of its request")

    def _check_outgoing_cancel(self, place: int, id: Id, about: Id | None) -> None:
        expect(self.plan.link is not EXCHANGE, "an exchange is cancelled by its stream")
        outer = self._served_by(place, about)
        expect(
            self.plan.lazy or outer is None or self.tracks[outer].served or self.tracks[outer].id == id,
            "not on this stream",
        )
        index = self._made_by(place, id)
        if index is None:  # a subscription that we served
            track = self.tracks[self._served_by(place, id)]
            expect(self.plan.link is DUPLEX and track.replied, "a subscription ends with its result, then the notice")
            expect(not track.end_sent, "one notice is enough")
            track.end_sent = True
        else:
            track = self.tracks[index]
            expect(not track.cancel_sent, "one cancellation is enough")
            track.cancel_sent = True
            expect(track.outcome in ("Cancelled", "TimedOut"), "only a request that we gave up is cancelled")
            expect(not self._is_fixed(index), "the opening is never cancelled")

    def check_end(self) -> None:
        """Check a world without moves."""
        for index, (planned, track) in enumerate(zip(self.plan.requests, self.tracks, strict=True)):
            if not track.id:
                continue
            expect(track.outcome, f"request {index} has no outcome")
            expect(track.done == track.received, f"the handler of request {index} has not ended")
            if self.cut_off:
                continue
            expect(track.replied == track.taken, "an answer that was taken is sent")
            gave_up = track.outcome in ("Cancelled", "TimedOut")
            quiet = self.plan.link is EXCHANGE or planned.method in UNCANCELLABLE
            expect(track.cancel_sent == (gave_up and not quiet), "a sender that gives up sends the cancellation")
            ended = planned.method == LISTEN and track.replied and "error" not in track.moves_made
            expect(
                track.end_sent == (ended and self.plan.link is DUPLEX),
                "a server that ends a subscription sends the notice",
            )
        for peer in self.peers:
            expect(peer.waiting == peer.serving == 0, "a request that has ended is forgotten")
            expect(peer.next_deadline() is None, "no deadline is left")
            expect(not peer.outgoing(), "no message is left in the queue")


@attrs.frozen
class Count:
    orders: int
    worlds: int


def explore(plan: Plan) -> Count:
    """Play every order of the events of a plan.  Return the number of orders and of distinct worlds."""
    orders: dict[bytes, int] = {}
    path: list[Move] = []

    def follow(world: World) -> int:
        frozen = world.freeze()
        key = hashlib.blake2b(frozen, digest_size=16).digest()
        if key not in orders:
            moves = world.moves()
            if not moves:
                world.check_end()
            total = 0 if moves else 1
            for at, move in enumerate(moves, 1):
                path.append(move)
                # The last move may use the world itself, which is not needed afterwards.
                total += follow((world if at == len(moves) else World(plan, frozen)).play(move))
                path.pop()
            orders[key] = total
        return orders[key]

    try:
        return Count(follow(World(plan)), len(orders))
    except Exception as error:
        error.add_note(f"in {plan}\nafter {', '.join(f'{verb} {at}' for verb, at in path)}")
        raise


def play_script(plan: Plan, script: str) -> None:
    """Play one order: verbs, each with or without the number of its object (without: the first possible one).

    `arrive` delivers all messages on their way, in order.
    """
    world = World(plan)
    for step in script.split(", "):
        verb, _, at = step.partition(" ")
        verbs = ("up", "down") if verb == "arrive" else (verb,)
        while fitting := [each for each in world.moves() if each[0] in verbs and at in ("", str(each[1]))]:
            world.play(fitting[0])
            if verb != "arrive":
                break
        else:
            expect(verb == "arrive", f"{step} cannot happen now")
    world.check_end()
