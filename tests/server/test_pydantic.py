"""Models of pydantic in a program that has it.  The package imports no pydantic: it uses the methods of the models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.installed import needs, python_of

PYDANTIC = "pydantic==2.14.3"
PROGRAM = """
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal

import trio
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator

from trio_mcp import Accepted, Context, Server
from trio_mcp.testing import open_memory_pair
from trio_mcp.core.schema import to_json_value


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(BaseModel):
    colour: Colour
    count: Annotated[int, Field(ge=1)] = 1
    note: str | None = None


class Node(BaseModel):
    model_config = ConfigDict(extra="forbid")
    on: date
    price: Decimal = Field(alias="thePrice")
    parts: list["Node"] = []

    @field_validator("on")
    @classmethod
    def recent(cls, value: date) -> date:
        if value.year < 2000:
            raise ValueError("too old")
        return value

    @computed_field
    @property
    def total(self) -> int:
        return len(self.parts)


class Secret(Node):
    secret: str = "hunter2"


class Cat(BaseModel):
    kind: Literal["cat"]


class Number(BaseModel):
    n: int


class Text(BaseModel):
    n: str


server = Server("models")


@server.tool
def same(node: Node) -> Node:
    assert isinstance(node, Node) and all(isinstance(each, Node) for each in node.parts)
    return Secret(on=node.on, thePrice=node.price, parts=node.parts)


@server.tool
def untyped():
    return [Cat(kind="cat")]


@server.tool
def either(it: Number | Text | Cat | list[Cat]) -> Number | Text | Cat | list[Cat]:
    return it


@server.tool
def endless() -> Annotated[float, "It is none."] | Number:
    return Number.model_construct(n=float("nan"))


@server.tool
async def order(ctx: Context) -> str:
    match await ctx.elicit("Which?", Size):
        case Accepted(Size(colour=Colour.BLUE, count=2, note=None)):
            return "blue"
    return "none"


async def main() -> None:
    asked = []

    async def answer(form):
        asked.append(form)
        return Size(colour="blue", count=2)

    for revision in ("2025-11-25", "2026-07-28"):
        async with open_memory_pair(server, revision=revision, elicitation=answer) as pair:
            client = pair.client
            leaf = {"on": "2026-01-31", "thePrice": "1.50", "parts": []}
            node = {**leaf, "parts": [leaf]}
            said = await client.call_tool("same", {"node": node})
            assert said.structured_content == {**leaf, "parts": [{**leaf, "total": 0}], "total": 1}, said
            for wrong in ({"on": "1999-01-01", "thePrice": 1}, {**leaf, "more": 1}, {**leaf, "on": 3}):
                said = await client.call_tool("same", {"node": wrong})
                assert said.is_error, said
            assert (await client.call_tool("untyped")).content[0].text == '[{"kind": "cat"}]'
            cat = Cat(kind="cat")
            for it in (Number(n=1), Text(n="1"), cat, [cat]):
                given = {"it": to_json_value(it)}
                value = await client.call_tool("either", given, returns=Number | Text | Cat | list[Cat])
                assert value == it, value  # also where another one would take the text for a number
            assert (await client.call_tool("either", {"it": {"n": [1]}})).is_error
            assert (await client.call_tool("endless")).is_error
            assert await client.call_tool("order", returns=str) == "blue"
    assert asked[0].fields.keys() == {"colour", "count", "note"}, asked[0]


trio.run(main)
"""


@pytest.mark.full  # it installs pydantic
def test_models_are_arguments_results_and_forms() -> None:
    python = needs("pydantic", lambda: python_of("pydantic", [PYDANTIC]))
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(packages)])
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
