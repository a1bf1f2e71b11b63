"""What the clients in Python see otherwise than the table says, and why; see `interop`."""

from __future__ import annotations

from tests.peers.behaviours import LISTS, Holding
from tests.peers.interop import NOTHING, Gap, Pair

__all__ = ["GAPS"]

FIRST_RELEASE = {
    "list": Gap({**LISTS, "paged": []}, "it puts the cursor where no server looks for it, and is given one page only"),
    "progress": Gap(NOTHING, "its interface has no way to ask for progress"),
    "cancel": Gap(NOTHING, "its interface has no way to cancel"),
    "sampling": Gap(
        Holding("sampling/createMessage needs the client capability sampling, which was not declared"),
        "it does not declare it, so it is not asked, and the model reads why",
    ),
}
SIGNALS = Gap("clean, but the server ended with SIGTERM", "it does not close standard input, and sends SIGTERM at once")

GAPS: dict[Pair, dict[str, Gap]] = {
    ("python-1.0.0", "stdio"): FIRST_RELEASE,
    ("python-1.0.0", "sse"): FIRST_RELEASE,
    ("python-1.9.4", "stdio"): {"end": SIGNALS},
}
