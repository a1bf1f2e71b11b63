"""Mistakes of handlers: each is a function without arguments that can be registered as a tool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import trio

from trio_mcp import Limits, RequestError, Server

__all__ = [
    "EXPECTED_IN_THE_LOG",
    "KEPT_GENERATORS",
    "MISTAKES",
    "CustomBaseException",
    "Mistake",
    "server_with_mistakes",
    "stale_cancellation",
    "yield_in_a_nursery",
]

Mistake = Callable[[], Awaitable[Any]]
MISTAKES: dict[str, Mistake] = {}
KEPT_GENERATORS: list[Any] = []


def mistake(function: Mistake) -> Mistake:
    MISTAKES[function.__name__] = function
    return function


# Scopes and nurseries that are left open.


async def yield_in_a_nursery() -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        nursery.start_soon(trio.sleep_forever)
        yield 1


async def yield_in_a_timeout() -> AsyncIterator[int]:
    with trio.move_on_after(1):
        yield 1


@mistake
async def return_out_of_a_nursery() -> int:
    async for number in yield_in_a_nursery():
        return number
    return 0


@mistake
async def break_out_of_a_nursery() -> int:
    async for _ in yield_in_a_nursery():
        break
    for _ in range(5):
        await trio.sleep(0.1)
    return 1


@mistake
async def break_out_of_a_nursery_within_another() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 1)
        async for _ in yield_in_a_nursery():
            break
        await trio.sleep(0.1)


@mistake
async def raise_out_of_a_nursery() -> None:
    async for _ in yield_in_a_nursery():
        raise ValueError("raised beside a nursery")


@mistake
async def return_out_of_a_timeout() -> int:
    async for number in yield_in_a_timeout():
        return number
    return 0


@mistake
async def outlast_a_timeout_that_was_left() -> None:
    async for _ in yield_in_a_timeout():
        break
    await trio.sleep(60)


@mistake
async def enter_a_scope() -> None:
    trio.CancelScope().__enter__()


@mistake
async def enter_a_cancelled_scope() -> None:
    trio.CancelScope(deadline=-1).__enter__()
    await trio.sleep(1)


@mistake
async def enter_a_nursery() -> None:
    manager = trio.open_nursery()
    nursery = await manager.__aenter__()
    nursery.start_soon(trio.sleep_forever)


@mistake
async def keep_a_nursery_open() -> None:
    generator = yield_in_a_nursery()
    KEPT_GENERATORS.append(generator)
    await anext(generator)


# Unusual exceptions.


async def stale_cancellation() -> trio.Cancelled:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            kept = error
            raise
    return kept


@mistake
async def raise_a_stale_cancellation() -> None:
    raise await stale_cancellation()


@mistake
async def raise_a_stale_cancellation_in_a_group() -> None:
    raise BaseExceptionGroup("two", [await stale_cancellation(), ValueError("raised beside a cancellation")])


@mistake
async def raise_generator_exit() -> None:
    raise GeneratorExit


@mistake
async def raise_generator_exit_in_a_group() -> None:
    raise BaseExceptionGroup("two", [GeneratorExit(), ValueError("raised beside a generator's exit")])


@mistake
async def raise_system_exit() -> None:
    raise SystemExit(3)


class CustomBaseException(BaseException):
    """A class that derives from BaseException and is unknown to Python."""


@mistake
async def raise_a_base_exception() -> None:
    raise CustomBaseException


class Unwritable(dict[str, int]):
    """Data of an error that raises when it is written, which happens after the handler has ended."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(a=1)
        self.error = error

    def items(self) -> Any:
        raise self.error


@mistake
async def raise_an_error_with_unwritable_data() -> None:
    raise RequestError(-32000, "refused by the callback", Unwritable(KeyError("a")))


@mistake
async def raise_an_error_whose_data_exits_when_written() -> None:
    raise RequestError(-32000, "refused by the callback", Unwritable(GeneratorExit()))


EXPECTED_IN_THE_LOG = {
    "raise_out_of_a_nursery": "raised beside a nursery",
    "raise_a_stale_cancellation_in_a_group": "raised beside a cancellation",
    "raise_generator_exit_in_a_group": "raised beside a generator's exit",
}


def server_with_mistakes(**limits: float) -> tuple[Server, trio.Event]:
    server = Server("mistaken", limits=Limits(**limits))
    gate = trio.Event()
    for function in MISTAKES.values():
        server.tool(function)

    @server.tool
    async def wait() -> str:
        await gate.wait()
        return "waited"

    @server.resource("mistake://{name}")
    async def resource(name: str) -> str:
        await MISTAKES[name]()
        return "read"

    return server, gate
