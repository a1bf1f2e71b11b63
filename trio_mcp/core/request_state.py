"""Request states: what a server needs to continue a call, sealed, because it travels through the client (see `rounds`).

A returned state is the input of an attacker until its seal, owner, age and request have been checked.  A state with a
handle continues a handler that waits in the process of the caller, once; the caller keeps the handlers.  A state
without a handle carries the recorded answers, so that any instance with the same key can run the handler again from the
start.

Two things surprise:

- *The clock.*  A sealed state can outlive the process that sealed it, so `StateSealer` takes the time in seconds since
  the epoch.
- *Sealed is not secret.*  The holder of a state can read it, but not change it.  The standard library has no
  authenticated encryption, and the contents of a state need none: the answers come from the client that holds it, and
  the principal is that client.  A handler must not carry data in it that its client may not see.

`principal` is always a stable name: text that differs for each principal and stays the same after a restart and on
every instance (a user id, not a token).  None means not authenticated.  If the principals of an application are
objects, pass a member of them.  A value that is not a str or None raises `UsageError`: if it did not come back equal
from a state, it would lock its owner out.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, RequestError, UsageError
from trio_mcp.core.messages import Json, JsonObject, record
from trio_mcp.core.revisions import stable_name

__all__ = ["MAX_STATE_CHARS", "SealedState", "StateRefusal", "StateSealer", "read_keys"]

MAX_STATE_CHARS = 1024 * 1024
"""Recorded forms are a few KiB; a sampled image may take most of this.  A state travels twice in every round and is
hashed once for each key, so it stays well below the size limit of a message."""


# The first three errors are the same, so that a forger does not learn which check failed, and a thief does not learn
# that a stolen state is genuine.  The other errors go to a caller that has proven to own the state, and say how to go
# on.
_NOT_YOURS = "requestState was not issued to this caller by this server"
_NOT_THIS = "requestState belongs to another request: a retry repeats the method and params of the original"


class StateRefusal(enum.Enum):
    """Why a `requestState` is refused, and the text for the client, which tells less."""

    MALFORMED = 1, _NOT_YOURS  # not a text of a StateSealer with any key
    BAD_SEAL = 2, _NOT_YOURS  # changed, or sealed with a key that this sealer does not have, or not any more
    OTHER_PRINCIPAL = 3, _NOT_YOURS
    EXPIRED = 4, "requestState has expired: send the request again without it"
    OTHER_METHOD = 5, _NOT_THIS
    OTHER_PARAMS = 6, _NOT_THIS
    # This instance parked its handler, which is not parked any more.
    SPENT = 7, "requestState has been used or has expired: send the request again without it"
    # Another instance parked its handler, or this one before a restart.
    ELSEWHERE = 8, "The call of this requestState does not wait here: send the request again without it"
    # The replica that parked its handler has ended.
    HOLDER_GONE = 9, "The process that held this call has ended: send the request again without requestState"

    @property
    def error(self) -> RequestError:
        """The error to send to the client."""
        return RequestError(INVALID_PARAMS, self.value[1])


@record
class SealedState:
    """The data that a server needs to continue a call; the retry brings all of it back, so the server keeps none of it.

    | Member | Meaning |
    |---|---|
    | `round` | the number of results sent for the call, so that each of its states is different |
    | `expires` | in seconds since the epoch |
    | `handle` | a waiting handler of the caller, or None |
    | `answers` | the recorded answers, for a handler that runs again from the start |
    | `carried` | any JSON that a handler with its own rounds needs back |
    """

    round: int
    expires: float
    handle: str | None = None
    answers: Mapping[str, JsonObject] = attrs.field(factory=dict)
    carried: Json = None


# The signed data begins with its purpose and the version of its layout.  So an older state, or other data that was
# signed with the same key, cannot pass for a state of this layout: a state with a valid seal is well-formed.
_PURPOSE = b"trio_mcp requestState 1\0"
_SEAL_BYTES = 32
# A retry may change these three params; with any other change it is another request.
_NOT_DIGESTED = frozenset({"_meta", "inputResponses", "requestState"})


class StateSealer:
    """Seals and opens `requestState`.

    mrtr-09: HMAC-SHA256 protects its integrity.  mrtr-10: it is valid for one principal, one method and its params,
    until it expires.  The first key seals, and every key opens: to change keys, put the new key first, and drop the old
    key when the last of its states has expired.  Instances that share keys open each other's states (mrtr-27).

    A client can send a state without a handle several times while it is valid; the handler must guard an effect that
    may happen only once.  Without authentication every caller has the principal None, so every holder of a state can
    use it.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        # A client holds states and can try keys without a time limit; a key shorter than the seal would be weaker than
        # the seal.  A single key instead of the sequence would be read as a sequence of numbers.
        if (
            not isinstance(keys, Sequence)
            or not keys
            or any(not isinstance(key, bytes) or len(key) < _SEAL_BYTES for key in keys)
        ):
            raise UsageError(
                f"sealing needs a sequence of keys, such as [key], each of at least {_SEAL_BYTES} random bytes"
            )
        self._keys = tuple(keys)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """A short text for each key, in their order.  It differs for each key, and tells nothing about it."""
        return tuple(hmac.digest(key, b"trio_mcp fingerprint 1", "sha256")[:8].hex() for key in self._keys)

    def seal(self, state: SealedState, method: str, params: Mapping[str, Any], principal: str | None) -> str:
        """Return the `requestState` with which `principal` can retry this request.

        Raises `UsageError` if the state holds a value that is not JSON, and `RequestError`, to be sent as the answer,
        if it is too large.
        """
        conditions = (stable_name(principal), method, _digest(params), state.expires)
        payload = _canonical((*conditions, state.round, state.handle, dict(state.answers), state.carried))
        text = base64.urlsafe_b64encode(_seal(self._keys[0], payload) + payload).decode()
        if len(text) > MAX_STATE_CHARS:
            raise RequestError(
                INTERNAL_ERROR,
                f"The requestState of this call may have {MAX_STATE_CHARS} characters; it has {len(text)}",
            )
        return text

    def open(
        self, text: Json, method: str, params: Mapping[str, Any], principal: str | None, now: float
    ) -> SealedState | StateRefusal:
        """Check the `requestState` of a request.  `text` may be any JSON; an invalid value never raises (mrtr-08)."""
        caller = stable_name(principal)
        payload = self._unsealed(text)
        if isinstance(payload, StateRefusal):
            return payload
        owner, sealed_method, digest, expires, round, handle, answers, carried = json.loads(payload)
        # The owner is checked first: another caller learns nothing else about the state.
        if owner != caller:
            return StateRefusal.OTHER_PRINCIPAL
        if now >= expires:
            return StateRefusal.EXPIRED
        if sealed_method != method:
            return StateRefusal.OTHER_METHOD
        if digest != _digest(params):
            return StateRefusal.OTHER_PARAMS
        return SealedState(round, expires, handle, answers, carried)

    def _unsealed(self, text: Json) -> bytes | StateRefusal:
        if not isinstance(text, str) or len(text) > MAX_STATE_CHARS:
            return StateRefusal.MALFORMED
        try:
            raw = base64.urlsafe_b64decode(text)
        except ValueError:  # wrong padding, or not ASCII
            return StateRefusal.MALFORMED
        # The decoder skips invalid characters and ignores spare bits.  One state has one text: refuse all other texts.
        if base64.urlsafe_b64encode(raw).decode() != text:
            return StateRefusal.MALFORMED
        seal, payload = raw[:_SEAL_BYTES], raw[_SEAL_BYTES:]
        if not any(hmac.compare_digest(seal, _seal(key, payload)) for key in self._keys):
            return StateRefusal.BAD_SEAL
        return payload


def read_keys(text: str, where: str) -> list[bytes]:
    """Read keys in hexadecimal digits, with commas between them.  `where` names the text in the error."""
    try:
        return [bytes.fromhex(each) for each in text.split(",")]
    except ValueError:  # the error must not repeat a part of a key
        why = "keys in hexadecimal digits, with a comma between two keys; `openssl rand -hex 32` makes one"
        raise UsageError(f"{where} must have {why}") from None


def _seal(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + payload, "sha256")


def _canonical(value: Json) -> bytes:
    """One text for one value, with any JSON library.  ASCII, so that lone surrogates survive."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"a request state must be JSON: {error}") from None


def _digest(params: Mapping[str, Any]) -> str:
    compared = {name: value for name, value in params.items() if name not in _NOT_DIGESTED}
    return hashlib.sha256(_canonical(compared)).hexdigest()
