"""Two peers, the network between them, and everything that can happen to their requests, in every order.

A `Plan` says which requests are made and what may happen to them; a `World` is one moment of it.  `World.moves` names
everything that can happen next, `World.play` lets it happen and compares what the peers return, report and send with
what the protocol promises.  The promises are written down here once more, and without a table.

`explore` plays every order of a plan.  It visits each distinct world once: all that a promise depends on, past events
included, is part of the world, so equal worlds (told by a digest of all they are made of) have equal futures, and the
number of orders that lead on from one is the sum over its moves.  Nothing is left out, and nothing is played twice.
`tell` plays one order, given as text.

How messages travel: on a duplex in one order each way; to a session each in a POST of its own, so in any order, and
back in the order of each stream; on an exchange likewise, with a server for each request.  A broken stream of a session
is resumed, so nothing on it is lost.  On a duplex each side may end its own direction: what it sends afterwards goes
nowhere, and the other side hears of the end after all that came before it.  What was due may be noticed late: time
passes by one move, and is looked at by another, or when the next message comes.
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
"""What happens, and to what: a request by its place in the plan, a peer by its place in `World.peers`, a message going
up by its place in the queue, a stream coming down by the id of its request (0: the one for everything else)."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@attrs.frozen
class Wish:
    """One request: who makes it, in the course of which other, and what may happen to it besides an answer.

    `may` holds any of: `progress` and `note` (by its handler), `error`, `garble` (the answer is spoilt on the way),
    `cancel` and `fail` (by its maker), `rogue` (a cancellation where none may come, or once more), `teardown` (a
    cancellation by the side that serves it, without a word).
    """

    method: str = "tools/call"
    may: frozenset[str] = attrs.field(default="", converter=_words)
    by: Role = CLIENT
    inside: int | None = None
    deadline: float | None = None
    times: int = 1  # that each of these may happen


@attrs.frozen
class Plan:
    """`losses`: of `stream`, `link` and `input` (one direction of a duplex), what may be lost.  `lazy`: what is queued
    leaves by a move of its own."""

    link: LinkKind
    wishes: tuple[Wish, ...]
    losses: frozenset[str] = attrs.field(default="", converter=_words)
    lazy: bool = False


@attrs.define(slots=False)
class Track:
    """What has happened to one request so far."""

    id: int = 0  # none yet
    outcome: str = ""  # that its maker got
    received: bool = False
    stopped: bool = False  # its handler was told to stop
    done: bool = False  # its handler has ended
    taken: bool = False  # and its answer was taken
    replied: bool = False  # which was put on the wire
    told: bool = False  # its cancellation was
    parted: bool = False  # the notice was that a server ended it
    broken: bool = False  # its stream is, or was closed by the client
    used: tuple[str, ...] = ()  # the moves made that are counted

    @property
    def served(self) -> bool:
        return self.received and not self.stopped and not self.done


class Broken(AssertionError):
    """A promise was."""


def expect(holds: object, promise: str) -> None:
    if not holds:
        raise Broken(promise)


class World:
    """One moment of a plan."""

    def __init__(self, plan: Plan, frozen: bytes | None = None) -> None:
        self.plan = plan
        if frozen is not None:
            (
                self.peers, self.tracks, self.up, self.down, self.queued, self.now, self.cut_off,
                self.closing, self.closed,
            ) = pickle.loads(frozen)  # fmt: skip
            return
        # The client, and the server; but each modern POST has a server for itself.
        servers = len(plan.wishes) if plan.link is EXCHANGE else 1
        self.peers = [Peer(CLIENT, link=plan.link), *(Peer(SERVER, link=plan.link) for _ in range(servers))]
        self.tracks = [Track() for _ in plan.wishes]
        self.up: list[Message] = []
        self.down: dict[Id, list[Message]] = {}
        self.queued: tuple[int, ...] = ()
        self.now = 0.0
        self.cut_off = False
        self.closing: tuple[int, ...] = ()  # the peers that have ended their direction,
        self.closed: tuple[int, ...] = ()  # and those that have heard of it from the other one

    def freeze(self) -> bytes:
        lanes = {lane: self.down[lane] for lane in sorted(self.down) if self.down[lane]}
        parts = (
            self.peers, self.tracks, self.up, lanes, self.queued, self.now, self.cut_off, self.closing, self.closed,
        )  # fmt: skip
        for peer in self.peers:
            peer.next_deadline()  # forgets the deadlines that were met
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.fast = True  # by value only: which equal strings are the same object says nothing
        pickler.dump(parts)
        return buffer.getvalue()

    # Who is who.

    def _place(self, index: int, role: Role) -> int:
        """Where the peer of this role stands that request `index` concerns."""
        return 0 if role is CLIENT else index + 1 if self.plan.link is EXCHANGE else 1

    def _maker(self, index: int) -> int:
        return self._place(index, self.plan.wishes[index].by)

    def _servant(self, index: int) -> int:
        return self._place(index, self.plan.wishes[index].by.other)

    def _made_by(self, place: int, id: object) -> int | None:
        return next((at for at, each in enumerate(self.tracks) if each.id == id and self._maker(at) == place), None)

    def _served_by(self, place: int, id: object) -> int | None:
        return next((at for at, each in enumerate(self.tracks) if each.id == id and self._servant(at) == place), None)

    def _subject(self, message: Message) -> int | None:
        """Which request a message from the client is about, on an exchange."""
        return self._made_by(0, message.params["requestId"] if isinstance(message, Notification) else message.id)

    # What can happen next.

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
            moves += [("end", place) for place in (0, 1) if self._may_hear_the_end(place)]
        return moves

    def _may_hear_the_end(self, place: int) -> bool:
        on_the_way = any(self.down.values()) if place == 0 else bool(self.up)
        return 1 - place in self.closing and place not in self.closed and not on_the_way

    def _moves_of(self, index: int) -> Iterator[str]:
        wish, track = self.plan.wishes[index], self.tracks[index]
        if not track.id:
            maker = self._maker(index)
            silent = self.peers[maker].closed or maker in (*self.closing, *self.closed)
            if not silent and (wish.inside is None or self.tracks[wish.inside].served):
                yield "send"
            return
        left = [verb for verb in sorted(wish.may) if track.used.count(verb) < wish.times]
        yield from (verb for verb in left if verb in ("cancel", "fail"))
        given_up = track.broken if self.plan.link is EXCHANGE else track.told or wish.method in UNCANCELLABLE
        if "rogue" in left and given_up:
            yield "rogue"
        if track.received:
            yield from (verb for verb in left if verb in ("progress", "note", "teardown"))
            if not track.done:
                yield from ("answer", *(verb for verb in left if verb in ("error", "garble")))
        if "stream" in self.plan.losses and wish.by is CLIENT and not self.cut_off and not track.broken:
            yield "break"
        if "break" in track.used and "feel" not in track.used:
            yield "feel"
        if track.broken and track.received and "hear" not in track.used:
            yield "hear"

    # Letting it happen: a method for each verb.

    def play(self, move: Move) -> World:
        verb, at = move
        getattr(self, "_" + verb)(at)
        return self

    def _count(self, index: int, verb: str) -> Track:
        track = self.tracks[index]
        track.used = tuple(sorted((*track.used, verb)))
        return track

    def _send(self, index: int) -> None:
        wish, place = self.plan.wishes[index], self._maker(index)
        about = None if wish.inside is None else self.tracks[wish.inside].id
        self.tracks[index].id = self.peers[place].request(
            wish.method, deadline=wish.deadline, progress="progress" in wish.may, about=about
        )
        self._drain(place)

    def _cancel(self, index: int) -> None:
        track, place = self._count(index, "cancel"), self._maker(index)
        cancelled = self.peers[place].cancel(track.id, "enough")
        expect(cancelled == (not track.outcome), "cancel tells whether it came in time")
        if cancelled:
            self._ends(index, "Cancelled")
        self._drain(place)

    def _fail(self, index: int) -> None:
        """Its maker learns that there will be no answer; one that comes all the same is late."""
        track, place = self._count(index, "fail"), self._maker(index)
        self._compare(
            self.peers[place].fail(track.id, "refused"), [(ConnectionLost, index)] if self._waits(index) else []
        )
        self._drain(place)

    def _progress(self, index: int) -> None:
        track, place = self._count(index, "progress"), self._servant(index)
        sent = self.peers[place].progress(track.id, track.used.count("progress"))
        expect(sent == track.served, "progress is sent while the request is served, and only then")
        self._drain(place)

    def _note(self, index: int) -> None:
        track, place = self._count(index, "note"), self._servant(index)
        sent = self.peers[place].notify(MESSAGE, about=track.id)
        expect(sent == track.served, "a note is sent while its request is served, and only then")
        self._drain(place)

    def _answer(self, index: int, answer: Callable[[Peer, Id], bool] = lambda peer, id: peer.answer(id, {})) -> None:
        track, place = self.tracks[index], self._servant(index)
        track.taken = answer(self.peers[place], track.id)
        expect(track.taken != track.stopped, "an answer is taken unless the handler was told to stop")
        track.done = True
        self._drain(place)

    def _error(self, index: int) -> None:
        self._count(index, "error")
        self._answer(index, lambda peer, id: peer.refuse(id, RequestError(-32603, "no")))

    def _garble(self, index: int) -> None:
        self._count(index, "garble")
        self._answer(index)

    def _rogue(self, index: int) -> None:
        self._travel(self._maker(index), Notification(CANCELLED, {"requestId": self._count(index, "rogue").id}), None)

    def _teardown(self, index: int) -> None:
        id = self._count(index, "teardown").id
        self._travel(self._servant(index), Notification(CANCELLED, {"requestId": id}), id)

    def _break(self, index: int) -> None:
        track = self._count(index, "break")
        track.broken = True
        if self.plan.link is EXCHANGE:  # what was on it is lost; a session sends it again
            self.up = [message for message in self.up if self._subject(message) != index]
            self.down.pop(track.id, None)

    def _feel(self, index: int) -> None:
        """The client notices that the stream is broken."""
        track = self._count(index, "feel")
        lost = self.plan.link is EXCHANGE and not track.outcome
        self._lose_stream(0, track, [(ConnectionLost, index)] if lost else [])

    def _hear(self, index: int) -> None:
        """The server notices that the stream is broken, or was closed."""
        track = self._count(index, "hear")
        stops = self.plan.link is EXCHANGE and track.served
        self._lose_stream(self._place(index, SERVER), track, [(RequestCancelled, index)] if stops else [])

    def _lose_stream(self, place: int, track: Track, promised: list[tuple[type, int]]) -> None:
        before = pickle.dumps(self.peers[place])
        self._compare(self.peers[place].connection_lost(about=track.id), promised)
        if not promised:
            expect(pickle.dumps(self.peers[place]) == before, "a lost stream that ends nothing changes nothing")
        self._drain(place)

    def _cut(self, _: int) -> None:
        self.cut_off = True
        self.up.clear()
        self.down.clear()

    def _lost(self, place: int) -> None:
        by_id = sorted(range(len(self.tracks)), key=lambda at: self.tracks[at].id)
        promised = [(ConnectionLost, at) for at in by_id if self._maker(at) == place and self._waits(at)]
        promised += [(RequestCancelled, at) for at in by_id if self._servant(at) == place and self.tracks[at].served]
        events = self.peers[place].connection_lost()  # in whatever order
        self._compare(sorted(events, key=lambda event: (type(event) is not ConnectionLost, event.id)), promised)
        self._drain(place)

    def _close(self, place: int) -> None:
        self.closing = tuple(sorted((*self.closing, place)))

    def _end(self, place: int) -> None:
        """What it waited for will not come; what it serves goes on."""
        self.closed = tuple(sorted((*self.closed, place)))
        lost = [at for at in range(len(self.tracks)) if self._maker(at) == place and self._waits(at)]
        lost.sort(key=lambda at: self.tracks[at].id)
        self._compare(self.peers[place].input_ended(), [(ConnectionLost, at) for at in lost])
        self._drain(place)

    def _clock(self, place: int) -> None:
        """Time passes, and nobody looks at it yet."""
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
            self._leaves(place, message, about)
            self._travel(place, message, about)

    # What follows.

    def _drain(self, place: int) -> None:
        peer, tracks = self.peers[place], list(enumerate(self.tracks))
        waiting = sum(self._maker(at) == place and self._waits(at) for at, _ in tracks)
        serving = sum(self._servant(at) == place and each.received and not each.done for at, each in tracks)
        expect((peer.waiting, peer.serving) == (waiting, serving), "what has not ended is known, and nothing else")
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
        if at is not None and self.plan.link is EXCHANGE and "break" in self.tracks[at].used:
            return
        if at is not None and isinstance(message, Response) and "garble" in self.tracks[at].used:
            message = InvalidMessage("spoilt", answers=message.id)
        to.append(message)

    def _receive(self, place: int, message: Message) -> None:
        promised = self._due(place)
        late = [index for _, index in promised]
        promised += [each for each in self._promised(place, message) if each[1] not in late]
        self._compare(self.peers[place].receive(message, self.now), promised)
        self._drain(place)

    def _compare(self, events: list[Event], promised: list[tuple[type, int]]) -> None:
        """What was reported against what should have been, which then becomes true."""
        expected = [(kind, self.tracks[index].id if index >= 0 else None) for kind, index in promised]
        found = [(type(event), getattr(event, "id", None)) for event in events]
        expect(found == expected, f"expected {expected}, got {events}")
        for kind, index in promised:
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
            track.broken = True  # the client closes the stream, which is how the server learns of it

    # The promises.

    def _waits(self, index: int) -> bool:
        return bool(self.tracks[index].id) and not self.tracks[index].outcome

    def _due(self, place: int) -> list[tuple[type, int]]:
        """What was due happens before anything else."""
        due = [
            (wish.deadline, index)
            for index, wish in enumerate(self.plan.wishes)
            if self._maker(index) == place
            and self._waits(index)
            and wish.deadline is not None
            and wish.deadline <= self.now
        ]
        return [(TimedOut, index) for _, index in sorted(due)]

    def _promised(self, place: int, message: Message) -> list[tuple[type, int]]:
        """What comes of a message; never a mistake, since nobody makes one."""
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
                return self._promised_by_cancel(place, id)
        return [(Notification, -1)]

    def _promised_by_cancel(self, place: int, id: Id) -> list[tuple[type, int]]:
        index = self._served_by(place, id)
        if index is not None and self.tracks[index].received and not self.tracks[index].done:
            stops = self.tracks[index].served and not self._is_fixed(index)
            return [(RequestCancelled, index)] if stops else []
        index = self._made_by(place, id)
        if index is not None and self._waits(index) and self.plan.wishes[index].method == LISTEN:
            return [(SubscriptionEnded, index)]
        return []

    def _is_fixed(self, index: int) -> bool:
        """Never cancelled, except by its stream, where requests have one each."""
        return self.plan.wishes[index].method in UNCANCELLABLE and self.plan.link is not EXCHANGE

    def _leaves(self, place: int, message: Message, about: Id | None) -> None:
        """What is put on the wire, and when it must not be."""
        if isinstance(message, Request):
            return
        if isinstance(message, Notification) and message.method == CANCELLED:
            self._cancel_leaves(place, message.params["requestId"], about)
            return
        track = self.tracks[self._served_by(place, about)]
        expect(not track.stopped, "nothing is sent for a request once its cancellation was seen")
        expect(not track.replied, "nothing is sent for a request after its answer")
        if isinstance(message, Response | Error):
            expect(message.id == track.id, "an answer has the id of its request")
            track.replied = True
        elif message.method == PROGRESS:
            expect(message.params["progressToken"] == track.id, "progress goes by the token of its request")

    def _cancel_leaves(self, place: int, id: Id, about: Id | None) -> None:
        expect(self.plan.link is not EXCHANGE, "an exchange is cancelled by its stream")
        outer = self._served_by(place, about)
        expect(self.plan.lazy or outer is None or self.tracks[outer].served or self.tracks[outer].id == id, "not there")
        index = self._made_by(place, id)
        if index is None:  # a subscription that we served
            track = self.tracks[self._served_by(place, id)]
            expect(self.plan.link is DUPLEX and track.replied, "a subscription ends with its result, then the notice")
            expect(not track.parted, "one notice is enough")
            track.parted = True
        else:
            track = self.tracks[index]
            expect(not track.told, "one cancellation is enough")
            track.told = True
            expect(track.outcome in ("Cancelled", "TimedOut"), "only what we gave up is cancelled")
            expect(not self._is_fixed(index), "the opening is never cancelled")

    def check_end(self) -> None:
        """Nothing can happen any more."""
        for index, (wish, track) in enumerate(zip(self.plan.wishes, self.tracks, strict=True)):
            if not track.id:
                continue
            expect(track.outcome, f"request {index} has no outcome")
            expect(track.done == track.received, f"the handler of request {index} has not ended")
            if self.cut_off:
                continue
            expect(track.replied == track.taken, "an answer that was taken is sent")
            gave_up = track.outcome in ("Cancelled", "TimedOut")
            quiet = self.plan.link is EXCHANGE or wish.method in UNCANCELLABLE
            expect(track.told == (gave_up and not quiet), "who gives up says so")
            ended = wish.method == LISTEN and track.replied and "error" not in track.used
            expect(track.parted == (ended and self.plan.link is DUPLEX), "who ends a subscription says so")
        for peer in self.peers:
            expect(peer.waiting == peer.serving == 0, "no request is kept that has ended")
            expect(peer.next_deadline() is None, "nothing is waited for")
            expect(not peer.outgoing(), "nothing was left behind")


@attrs.frozen
class Tally:
    orders: int
    worlds: int


def explore(plan: Plan) -> Tally:
    """Play every order of everything that can happen; how many there are, and how many distinct worlds."""
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
                # The last move may have the world itself: nobody needs it any more.
                total += follow((world if at == len(moves) else World(plan, frozen)).play(move))
                path.pop()
            orders[key] = total
        return orders[key]

    try:
        return Tally(follow(World(plan)), len(orders))
    except Exception as error:
        error.add_note(f"in {plan}\nafter {', '.join(f'{verb} {at}' for verb, at in path)}")
        raise


def tell(plan: Plan, story: str) -> None:
    """Play one order: verbs, each with or without what it happens to (without: to the first it can happen to).

    `arrive` is for everything on its way, in order.
    """
    world = World(plan)
    for chapter in story.split(", "):
        verb, _, at = chapter.partition(" ")
        verbs = ("up", "down") if verb == "arrive" else (verb,)
        while fitting := [each for each in world.moves() if each[0] in verbs and at in ("", str(each[1]))]:
            world.play(fitting[0])
            if verb != "arrive":
                break
        else:
            expect(verb == "arrive", f"{chapter} cannot happen now")
    world.check_end()
