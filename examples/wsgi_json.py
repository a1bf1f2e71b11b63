"""An MCP server behind WSGI: JSON responses, independent POSTs, no sessions.  It uses threads, and no event loop.

    python examples/wsgi_json.py 3000                 # wsgiref, on this machine: http://127.0.0.1:3000/mcp
    gunicorn --chdir examples wsgi_json:application   # or any other WSGI server, with any number of processes

The core checks paths, methods, hosts and origins, decides how a request is refused, and writes the response of each
revision.  This file has the five steps marked below.  This server cannot ask its clients or report progress, because a
JSON response has no room for other messages.  `trio_mcp.Server` has these features.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import attrs

from trio_mcp.core.errors import INTERNAL_ERROR, INVALID_PARAMS, INVALID_REQUEST, RequestError
from trio_mcp.core.http import Deliver, HttpPolicy, HttpRequest, Reply, ResponseEncoder, Serve, judge, refusal, screen
from trio_mcp.core.messages import Error
from trio_mcp.core.session import Call, Offer

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

OFFER = Offer({"name": "wsgi-example", "version": "1.0"}, {"tools": {}}, instructions="Echo texts, divide numbers.")
POLICY = HttpPolicy(sessions=False, json_only=True)  # allowed_hosts=["mcp.example.com"] to serve other machines


def echo(arguments: dict[str, Any]) -> str:
    text = arguments.get("text")
    if not isinstance(text, str):
        raise RequestError(INVALID_PARAMS, "text must be a string")
    return text


def divide(arguments: dict[str, Any]) -> str:
    """Divide without a check of the arguments, to show that an unexpected exception fails this call only."""
    return str(arguments["a"] / arguments["b"])


TOOLS: dict[str, tuple[Callable[[dict[str, Any]], str], dict[str, Any]]] = {
    "echo": (echo, {"text": {"type": "string"}}),
    "divide": (divide, {"a": {"type": "number"}, "b": {"type": "number"}}),
}


def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    reply = reply_to(environ)
    start_response(f"{reply.status} {HTTPStatus(reply.status).phrase}", list(reply.headers))
    return [reply.body]


def reply_to(environ: WSGIEnvironment) -> Reply:
    request = HttpRequest(environ["REQUEST_METHOD"], target_of(environ), headers_of(environ))
    head = screen(POLICY, request)  # Step 1: judge the head, before a byte of the body is read.
    if isinstance(head, Reply):
        return head
    length = environ.get("CONTENT_LENGTH") or ""
    if not length.isdecimal():  # without a length, a read of the body would wait forever in some WSGI servers
        return refusal(411, Error(None, INVALID_REQUEST, "a message is posted with its Content-Length"), head.cors)
    # Step 2: read the body, and judge the whole request.  Check a token here: judge(..., principal=...).
    request = attrs.evolve(request, body=environ["wsgi.input"].read(int(length)))
    verdict = judge(POLICY, request, screened=head)
    match verdict:
        case Serve():
            return answer(verdict)
        case Deliver():  # a notification; it is accepted and has no effect here
            return verdict.reply
        case Reply():
            return verdict
        case _:  # the other verdicts are about sessions and streams
            raise AssertionError(verdict)


def answer(verdict: Serve) -> Reply:
    session = verdict.new_session(OFFER, POLICY.limits)  # Step 3: a session that lives as long as this request.
    response = ResponseEncoder(verdict, session)
    for event in session.receive(verdict.message, now=0.0, about=response):  # `now` is unused: there are no deadlines
        if isinstance(event, Call):
            try:
                session.answer(event.request.id, result(event))  # Step 4: serve the requests.
            except RequestError as error:
                session.refuse(event.request.id, error)
            except Exception:  # noqa: BLE001  # its text may contain secrets, so it goes to the log only
                traceback.print_exc()
                session.refuse(event.request.id, RequestError(INTERNAL_ERROR, "the tool failed"))
    for message, _ in session.outgoing():
        response.send(message)
    part = response.data_to_send()  # Step 5: send the response, which is complete now.
    assert part is not None
    assert part.head is not None
    return Reply(*part.head, part.data)


def result(call: Call) -> dict[str, Any]:
    params = call.request.params
    if call.request.method == "tools/list":
        schemas = {name: {"type": "object", "properties": properties} for name, (_, properties) in TOOLS.items()}
        return {"tools": [{"name": name, "inputSchema": schema} for name, schema in schemas.items()]}
    name, arguments = params.get("name"), params.get("arguments", {})
    if not isinstance(name, str) or name not in TOOLS:
        raise RequestError(INVALID_PARAMS, "unknown tool; tools/list names those there are")
    if not isinstance(arguments, dict):
        raise RequestError(INVALID_PARAMS, "arguments must be an object")
    tool, _ = TOOLS[name]
    return {"content": [{"type": "text", "text": tool(arguments)}]}


def target_of(environ: WSGIEnvironment) -> str:
    # PATH_INFO lacks the prefix under which the application is mounted, and each of its characters is one byte.
    path, query = environ.get("PATH_INFO", ""), environ.get("QUERY_STRING", "")
    return quote(path.encode("latin-1")) + (f"?{query}" if query else "")


def headers_of(environ: WSGIEnvironment) -> dict[str, str]:
    fields = {
        name.removeprefix("HTTP_").replace("_", "-"): value
        for name, value in environ.items()
        if name.startswith("HTTP_") or name in ("CONTENT_TYPE", "CONTENT_LENGTH")
    }
    return {name: value for name, value in fields.items() if value}  # an absent type or length may be an empty string


class ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def main(port: int) -> None:
    with make_server("127.0.0.1", port, application, server_class=ThreadingServer, handler_class=QuietHandler) as http:
        print(f"serving http://127.0.0.1:{http.server_port}/mcp", flush=True)
        with suppress(KeyboardInterrupt):
            http.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000)
