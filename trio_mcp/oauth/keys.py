"""Keys that sign client assertions (private_key_jwt) and DPoP proofs, with PyJWT from the extra `oauth`.

`core.oauth.messages` builds the claims; this module makes the function that signs them from a PEM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from trio_mcp.core.errors import UsageError
from trio_mcp.core.messages import Json
from trio_mcp.core.oauth.messages import Key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

    Private: TypeAlias = PrivateKeyTypes

__all__ = ["ALGORITHMS", "PUBLIC_MEMBERS", "load_key", "new_key"]

ALGORITHMS: Mapping[str, tuple[str, str | None]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""Each algorithm with the kind and the curve of its keys (RFC 7518, 3.1 and 6.1).

A key is never used for another kind of algorithm, even if a token names one.  Symmetric algorithms are missing, because
the public key would be the secret, and so is "none", which is no signature.
"""
PUBLIC_MEMBERS = ("kty", "crv", "n", "e", "x", "y")  # of a JWK
_CURVES = ("secp256r1", "secp384r1", "secp521r1")


def load_key(
    pem: str | bytes, algorithm: str | None = None, *, id: str | None = None, password: str | bytes | None = None
) -> Key:
    """Load the private key in a PEM (PKCS #8), for `key` and `dpop` of `Application`.

    `algorithm` is the signature algorithm.  The kind of the key determines it, except for RSA, where the default is
    RS256.  `id` is the key's ``kid``, for authorization servers that know several keys of the application.  Raises
    `UsageError` if `pem` is not a private key, if the algorithm does not fit the key, or if PyJWT is not installed.
    """
    _jwt()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data, secret = (each.encode() if isinstance(each, str) else each for each in (pem, password))
    try:
        return _key(load_pem_private_key(data or b"", secret), algorithm, id)
    except (ValueError, TypeError):  # its text may repeat parts of the key
        raise UsageError(
            "the key cannot be read: pem must be the text of a private key, which begins with "
            "-----BEGIN PRIVATE KEY-----, not its path; an encrypted key needs its password"
        ) from None


def new_key() -> Key:
    """Make a new key for ES256, the usual algorithm for DPoP.

    The key is lost when the process ends, and tokens bound to it are useless without it.  A program that stores its
    tokens loads its key from a PEM instead: see `load_key`.  Raises `UsageError` if PyJWT is not installed.
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
        raise UsageError("keys need PyJWT: pip install 'trio_mcp[oauth]'")
    return jwt


def _key(private: Private, algorithm: str | None, id: str | None) -> Key:
    jwk = _public(private)
    known = [each for each, kind in ALGORITHMS.items() if kind == (jwk.get("kty"), jwk.get("crv"))]
    if not known or (algorithm is not None and algorithm not in known):
        usable = f"this one signs with {' or '.join(known)}" if known else "this one is of another kind"
        raise UsageError(f"a key must be EC, RSA or Ed25519; {usable}" + (f", not {algorithm}" if algorithm else ""))
    chosen = algorithm or known[0]
    encode = _jwt().encode

    def sign(claims: Mapping[str, Json], header: Mapping[str, Json]) -> str:
        signed: str = encode(dict(claims), private, chosen, dict(header))
        return signed

    return Key(chosen, sign, jwk, id)


def _public(private: Private) -> dict[str, str]:
    """Return the public key as a JWK; empty for a kind of key that this module does not support."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

    whole: dict[str, Any] = {}
    if isinstance(private, rsa.RSAPrivateKey):
        whole = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    elif isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name in _CURVES:
        whole = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
    elif isinstance(private, ed25519.Ed25519PrivateKey):
        whole = OKPAlgorithm.to_jwk(private.public_key(), as_dict=True)
    return {name: whole[name] for name in PUBLIC_MEMBERS if name in whole}
