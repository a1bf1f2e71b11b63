"""The server: registration, dispatch, sessions with clients, and the life of a server process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.server.context import *
    from trio_mcp.server.detached import *
    from trio_mcp.server.dispatch import *
    from trio_mcp.server.entries import *
    from trio_mcp.server.extensions import *
    from trio_mcp.server.forwarding import *
    from trio_mcp.server.handlers import *
    from trio_mcp.server.held_reports import *
    from trio_mcp.server.media import *
    from trio_mcp.server.parking import *
    from trio_mcp.server.process import *
    from trio_mcp.server.prompts import *
    from trio_mcp.server.publishing import *
    from trio_mcp.server.questions import *
    from trio_mcp.server.raw_entries import *
    from trio_mcp.server.registry import *
    from trio_mcp.server.replicas import *
    from trio_mcp.server.resources import *
    from trio_mcp.server.results import *
    from trio_mcp.server.run import *
    from trio_mcp.server.server import *
    from trio_mcp.server.session import *
    from trio_mcp.server.supervised import *
    from trio_mcp.server.supervisor import *
    from trio_mcp.server.threads import *
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "context": "ClientError ClientGone Context LOG ROOTS_CHANGED",
            "dispatch": "CallNext Dispatcher Middleware",
            "entries": (
                "CompletionOptions Entry HandlerOptions KINDS Kind LISTS PromptOptions RawResourceOptions "
                "RawToolOptions ResourceOptions ToolOptions tool_of"
            ),
            "detached": "CallHost DetachedCall ExtensionRun detach notice_call session_for_notices",
            "extensions": (
                "Agree Background ExtensionRegistry Listener ServerExtension agree candidates entry_for notify_client "
                "offered_by request_client start_subscription"
            ),
            "forwarding": "SharedParking",
            "handlers": "Arguments BadArguments Handler RunMode arguments_of raw typed",
            "held_reports": "HeldReports hold_report send_held",
            "media": "audio file image",
            "parking": "ParkedCall Parking PendingQuestion",
            "process": (
                "LAST ProcessLife announce check_process live parse_address run_stdio serve_stdio show_operator "
                "unbuffer watched"
            ),
            "prompts": "completer_of completion_result prompt_of prompt_result text_arguments",
            "publishing": "ListenerKey Publisher Watcher",
            "questions": "Elicit ElicitUrl Inquiry ListRoots Sample UrlElicitationRequired",
            "raw_entries": "raw_entry",
            "registry": "CAPABILITIES Catalog EntryRoute Filter Mount",
            "replicas": "LEASE QUICKLY Replica",
            "resources": "resource_of resource_result",
            "results": "BadResult InputRequired OutputSchema ToolError tool_failure tool_result",
            "run": "Rates Run RunMember Statistics drained running",
            "server": "Server check_names",
            "session": (
                "CANCELLED_CALL ChargedMessage ServerSession UNFINISHED address_of converse serve_stream socket_of "
                "start_work"
            ),
            "supervised": "Supervised run_workers",
            "supervisor": "ConnectionCounts Roster Supervisor",
            "threads": "Threads no_threads",
        },
    )
