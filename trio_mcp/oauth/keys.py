"""Keys that sign: client assertions (private_key_jwt) and DPoP proofs, by PyJWT from the extra `oauth`.

What is signed is made by `core.auth_proofs`; here a PEM becomes the function that signs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from trio_mcp.core.errors import UsageError
from trio_mcp.core.jsonrpc import Json
from trio_mcp.core.oauth.proofs import Key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

    Private: TypeAlias = PrivateKeyTypes

__all__ = ["load_key", "new_key"]

# By the kind and the curve of the public key (RFC 7518, 6): the first is what a key is used for unless it is said.
_ALGORITHMS: Mapping[tuple[str, str | None], tuple[str, ...]] = {
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_PUBLIC = ("kty", "crv", "n", "e", "x", "y")


def load_key(
    pem: str | bytes, algorithm: str | None = None, *, id: str | None = None, password: str | bytes | None = None
) -> Key:
    """The key in a PEM (PKCS #8), for `key` and `dpop` of `Application`.

    `algorithm` is what it signs by, which the key itself says but for RSA, where it is RS256; `id` is its ``kid``, for
    authorization servers that know several keys of the application.  Raises `UsageError` for what is no private
    key, for an algorithm that is not for it, and where PyJWT is not installed.
    """
    _jwt()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, secret = (each.encode() if isinstance(each, str) else each for each in (pem, password))
    try:
        return _key(load_pem_private_key(data or b"", secret), algorithm, id)
    except (ValueError, TypeError):  # whose text may repeat what was read
        raise UsageError(
            "the key cannot be read: it takes the text of a private key in PEM, not its path, which begins with "
            "-----BEGIN PRIVATE KEY-----, and its password if it has one"
        ) from None


def new_key() -> Key:
    """A fresh key for ES256, which DPoP is used with as a rule.

    Tokens that are bound to it are of no use without it, and it is gone with the process: to keep the one, keep the
    other, as a PEM.  Raises `UsageError` where PyJWT is not installed.
    """
    _jwt()
    from cryptography.hazmat.primitives.asymmetric import ec

    return _key(ec.generate_private_key(ec.SECP256R1()), None, None)


def _jwt() -> Any:
    try:
        import jwt
        from jwt.algorithms import has_crypto
    except ImportError:
        has_crypto = False
    if not has_crypto:
        raise UsageError("keys are used by PyJWT: pip install 'trio_mcp[oauth]'")
    return jwt


def _key(private: Private, algorithm: str | None, id: str | None) -> Key:
    jwk = _public(private)
    known = _ALGORITHMS.get((jwk.get("kty", ""), jwk.get("crv")), ())
    if not known or (algorithm is not None and algorithm not in known):
        able = f"this one is for {' or '.join(known)}" if known else "this is none of them"
        raise UsageError(f"a key is of EC, RSA or Ed25519; {able}" + (f", not {algorithm}" if algorithm else ""))
    chosen = algorithm or known[0]
    encode = _jwt().encode

    def sign(claims: Mapping[str, Json], header: Mapping[str, Json]) -> str:
        signed: str = encode(dict(claims), private, chosen, dict(header))
        return signed

    return Key(chosen, sign, jwk, id)


def _public(private: Private) -> dict[str, str]:
    """The public half as a JWK; empty for a kind of key that nothing is signed with here."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

    whole: dict[str, Any] = {}
    if isinstance(private, rsa.RSAPrivateKey):
        whole = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    elif isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name in _CURVES:
        whole = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
    elif isinstance(private, ed25519.Ed25519PrivateKey):
        whole = OKPAlgorithm.to_jwk(private.public_key(), as_dict=True)
    return {name: whole[name] for name in _PUBLIC if name in whole}
