"""How a server on stdio ended, whose client does not tell: ``witness.py FILE COMMAND ...``.

It runs the command with its own standard streams, passes SIGTERM on, and leaves the exit status in the file; or
``SIGTERM``, if that came and the server heeded it.
"""

import signal
import subprocess
import sys
from pathlib import Path

# The end of input may overtake the signal on its way through here: then the server may have ended by itself, or be so
# near to it that it handles signals no more.
HEEDED = {0, 128 + signal.SIGTERM, -signal.SIGTERM}

process: subprocess.Popen[bytes] | None = None
told = False


def pass_on(*_: object) -> None:
    global told
    told = True
    if process is not None:
        process.terminate()


file, *command = sys.argv[1:]
signal.signal(signal.SIGTERM, pass_on)  # before there is a server that somebody could hear of
process = subprocess.Popen(command)
if told:  # when there was nobody to pass it on to
    process.terminate()
status = process.wait()
Path(file).write_text("SIGTERM" if told and status in HEEDED else str(status))
