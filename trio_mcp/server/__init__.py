"""The server: registration, dispatch, sessions with clients, and the life of a server process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.server.arguments import *
    from trio_mcp.server.context import *
    from trio_mcp.server.dispatch import *
    from trio_mcp.server.handlers import *
    from trio_mcp.server.parking import *
    from trio_mcp.server.process import *
    from trio_mcp.server.publishing import *
    from trio_mcp.server.questions import *
    from trio_mcp.server.registry import *
    from trio_mcp.server.results import *
    from trio_mcp.server.run import *
    from trio_mcp.server.server import *
    from trio_mcp.server.session import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "arguments": "Arguments BadArguments arguments_of text_arguments",
            "context": "ClientError ClientGone Context LOG",
            "dispatch": "CallNext Dispatcher Middleware",
            "handlers": "Handler RunMode raw typed",
            "parking": "ParkedCall Parking next_round read_answer write_questions",
            "process": "ProcessLife live parse_address run_stdio serve_stdio watched",
            "publishing": "ListenerKey ListeningConnection Publisher Watcher",
            "questions": "Elicit ElicitUrl Inquiry ListRoots Sample UrlElicitationRequired",
            "registry": (
                "CAPABILITIES CHANGES Catalog CompletionOptions Entry EntryRoute Filter HandlerOptions KINDS Kind "
                "LISTS Mount PromptOptions RawResourceOptions RawToolOptions ResourceOptions ToolOptions completer_of "
                "prompt_of raw_prompt raw_resource raw_template raw_tool resource_of tool_of"
            ),
            "results": (
                "BadResult InputRequired OutputSchema ToolError audio completion_result file image prompt_result "
                "resource_result tool_failure tool_result"
            ),
            "run": "Rates Run RunMember Runs Statistics Threads drained no_threads",
            "server": "Server check_names",
            "session": ("ChargedMessage ServerSession UNFINISHED address_of converse serve_stream socket_of"),
        },
    )
