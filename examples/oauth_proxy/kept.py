"""What the authorization server keeps, in memory and bounded, and the secrets that lead to it."""

import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Generic, TypeVar

import trio

from .upstream import Tokens

T = TypeVar("T")


def hashed(secret: str) -> bytes:
    return sha256(secret.encode()).digest()


@dataclass(frozen=True)
class Client:
    id: str
    name: str
    redirect_uris: tuple[str, ...]
    method: str
    secret: bytes = field(repr=False)  # its hash; that of nothing for programs that could not keep one


@dataclass(frozen=True)
class Asked:
    """What a client asks the user for."""

    client: Client
    redirect_uri: str
    state: str | None
    challenge: str
    scopes: tuple[str, ...]
    browser: bytes


@dataclass
class Grant:
    """What a user has granted a client.  It ends when either of them, or the provider, says so."""

    client_id: str
    user: str
    scopes: tuple[str, ...]
    upstream: Tokens
    alive: bool = True
    renewing: trio.Lock = field(default_factory=trio.Lock, repr=False)


@dataclass
class Once:
    """A code or a refresh token.  It is kept when it was used: a second use means that there are two who have it."""

    grant: Grant
    asked: Asked | None = None
    used: bool = False


@dataclass(frozen=True)
class Access:
    grant: Grant
    scopes: tuple[str, ...]
    until: float


class Shelf(Generic[T]):
    """Things by secrets of which only hashes are kept.  Beyond `most` of them the oldest is lost."""

    def __init__(self, seconds: float, most: int = 10_000) -> None:
        self._seconds, self._most = seconds, most
        self._held: dict[bytes, tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, thing: T) -> str:
        secret = secrets.token_urlsafe(32)
        self._held[hashed(secret)] = (trio.current_time() + self._seconds, thing)
        while len(self._held) > self._most or next(iter(self._held.values()))[0] <= trio.current_time():
            del self._held[next(iter(self._held))]
        return secret

    def get(self, secret: str) -> T | None:
        until, thing = self._held.get(hashed(secret), (0.0, None))
        return thing if until > trio.current_time() else None

    def take(self, secret: str) -> T | None:
        thing = self.get(secret)
        self._held.pop(hashed(secret), None)
        return thing
