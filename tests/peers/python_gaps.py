"""Results of the clients in Python that differ from the table, with the reason; see `interop`."""

from __future__ import annotations

from tests.peers.behaviours import LISTS, Contains
from tests.peers.interop import NOT_TRIED, Gap, Pair

__all__ = ["GAPS"]

FIRST_RELEASE = {
    "list": Gap(
        {**LISTS, "paged": []}, "it puts the cursor into the wrong place of the request, and gets only the first page"
    ),
    "progress": Gap(NOT_TRIED, "its interface has no way to ask for progress"),
    "cancel": Gap(NOT_TRIED, "its interface has no way to cancel"),
    "sampling": Gap(
        Contains("sampling/createMessage needs the client capability sampling, which was not declared"),
        "it does not declare sampling, so it gets no request, and the tool returns the reason",
    ),
}
SIGNALS = Gap(
    "clean, but the server ended with SIGTERM", "it sends SIGTERM at once, without closing standard input first"
)

GAPS: dict[Pair, dict[str, Gap]] = {
    ("python-1.0.0", "stdio"): FIRST_RELEASE,
    ("python-1.0.0", "sse"): FIRST_RELEASE,
    ("python-1.9.4", "stdio"): {"end": SIGNALS},
}
