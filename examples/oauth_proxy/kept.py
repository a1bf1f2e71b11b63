"""The data that the authorization server stores, in memory and bounded, under hashes of secrets."""

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
    auth_method: str
    secret: bytes = field(repr=False)  # the hash of the client secret, or of an empty text for a public client


@dataclass(frozen=True)
class AuthorizationRequest:
    """The request of a client for the user's consent; `browser` is the hash of the cookie of the user's browser."""

    client: Client
    redirect_uri: str
    state: str | None
    challenge: str
    scopes: tuple[str, ...]
    browser: bytes


@dataclass
class Grant:
    """The consent of a user for a client.  It ends when the client, the user or the provider ends it."""

    client_id: str
    user: str
    scopes: tuple[str, ...]
    upstream: Tokens
    alive: bool = True
    renewing: trio.Lock = field(default_factory=trio.Lock, repr=False)


@dataclass
class SingleUse:
    """A code or a refresh token.  It stays in the store after its use: a second use shows that it was copied."""

    grant: Grant
    request: AuthorizationRequest | None = None
    used: bool = False


@dataclass(frozen=True)
class AccessToken:
    grant: Grant
    scopes: tuple[str, ...]
    expires_at: float


class SecretStore(Generic[T]):
    """Values by secrets that the store generates; it keeps only the hashes of the secrets.

    A value expires after `seconds`.  If there are more than `max_values`, the store drops the oldest one.
    """

    def __init__(self, seconds: float, max_values: int = 10_000) -> None:
        self._seconds, self._max_values = seconds, max_values
        self._values: dict[bytes, tuple[float, T]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: T) -> str:
        secret = secrets.token_urlsafe(32)
        self._values[hashed(secret)] = (trio.current_time() + self._seconds, value)
        while len(self._values) > self._max_values or next(iter(self._values.values()))[0] <= trio.current_time():
            del self._values[next(iter(self._values))]
        return secret

    def get(self, secret: str) -> T | None:
        expires_at, value = self._values.get(hashed(secret), (0.0, None))
        return value if expires_at > trio.current_time() else None

    def take(self, secret: str) -> T | None:
        value = self.get(secret)
        self._values.pop(hashed(secret), None)
        return value
