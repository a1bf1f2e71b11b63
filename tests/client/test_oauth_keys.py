"""Signing keys, loaded from a PEM or new."""

from __future__ import annotations

import builtins
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

from trio_mcp import UsageError
from trio_mcp.oauth import load_key, new_key

CURVES = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}


def private_key(algorithm: str) -> Any:
    if algorithm in CURVES:
        return ec.generate_private_key(CURVES[algorithm])
    return ed25519.Ed25519PrivateKey.generate() if algorithm == "EdDSA" else rsa.generate_private_key(65537, 2048)


def pem_of(private: Any, password: bytes | None = None) -> bytes:
    protection = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem: bytes = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
    return pem


@pytest.mark.parametrize("algorithm", ["ES256", "ES384", "ES512", "RS256", "EdDSA"])
def test_a_key_signs_with_the_algorithm_of_its_type(algorithm: str) -> None:
    private = private_key(algorithm)
    key = load_key(pem_of(private).decode(), id="first")
    assert (key.algorithm, key.id) == (algorithm, "first")
    token = key.sign({"a": 1}, {"typ": "dpop+jwt", "alg": algorithm, "jwk": dict(key.jwk)})
    header = jwt.get_unverified_header(token)
    assert (header["typ"], header["alg"], header["jwk"]) == ("dpop+jwt", algorithm, key.jwk)
    assert jwt.decode(token, jwt.PyJWK(header["jwk"], algorithm), [algorithm]) == {"a": 1}
    assert not {"d", "p", "q", "dp", "dq", "qi", "key_ops"} & key.jwk.keys()


@pytest.mark.parametrize("algorithm", ["PS256", "RS512"])
def test_an_rsa_key_signs_with_the_given_algorithm(algorithm: str) -> None:
    key = load_key(pem_of(private_key("RS256")), algorithm)
    assert jwt.get_unverified_header(key.sign({}, {"alg": algorithm}))["alg"] == algorithm


def test_a_key_may_have_a_password() -> None:
    pem = pem_of(private_key("ES256"), b"Geheim")
    assert load_key(pem, password="Geheim").algorithm == "ES256"
    for password in (None, "Falsch"):
        with pytest.raises(UsageError, match="the key cannot be read") as failed:
            load_key(pem, password=password)
        assert failed.value.__suppress_context__


def test_a_new_key_is_for_es256_and_unique() -> None:
    one, other = new_key(), new_key()
    assert one.algorithm == other.algorithm == "ES256"
    assert one.jwk != other.jwk
    assert one.jwk.keys() == {"kty", "crv", "x", "y"}


@pytest.mark.parametrize("pem", ["", "Geheim", b"-----BEGIN PRIVATE KEY-----\nR2VoZWlt\n-----END PRIVATE KEY-----\n"])
def test_the_error_of_an_invalid_key_does_not_show_it(pem: Any) -> None:
    with pytest.raises(UsageError, match="BEGIN PRIVATE KEY") as failed:
        load_key(pem)
    assert "Geheim" not in str(failed.value)
    assert "R2Vo" not in str(failed.value)


@pytest.mark.parametrize(
    ("private", "algorithm", "why"),
    [
        (private_key("ES256"), "RS256", "this one signs with ES256, not RS256"),
        (private_key("RS256"), "HS256", "not HS256"),
        (ec.generate_private_key(ec.SECP256K1()), None, "this one is of another kind"),
        (ed448.Ed448PrivateKey.generate(), None, "this one is of another kind"),
    ],
)
def test_a_key_refuses_algorithms_of_other_types(private: Any, algorithm: str | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load_key(pem_of(private), algorithm)


def test_the_error_without_the_extra_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == "jwt":
            raise ImportError(name)
        return whole(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    for make in (new_key, lambda: load_key("")):
        with pytest.raises(UsageError, match=r"pip install 'trio_mcp\[oauth\]'"):
            make()
