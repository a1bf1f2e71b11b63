"""Record how a stdio server ended, because its client does not report it: ``record_exit.py FILE COMMAND ...``.

The program runs the command with its own standard streams, forwards SIGTERM, and writes the exit status into the file;
or ``SIGTERM``, if that signal came and the server obeyed it.
"""

import signal
import subprocess
import sys
from pathlib import Path

# The end of input may reach the server before the forwarded signal.  Then the server may have exited by itself, or it
# may be exiting and not handle signals any more.
OBEYED = {0, 128 + signal.SIGTERM, -signal.SIGTERM}

process: subprocess.Popen[bytes] | None = None
signalled = False


def forward(*_: object) -> None:
    global signalled
    signalled = True
    if process is not None:
        process.terminate()


file, *command = sys.argv[1:]
signal.signal(signal.SIGTERM, forward)  # before the server starts, so that no signal is lost
process = subprocess.Popen(command)
if signalled:  # the signal came before the server had started
    process.terminate()
status = process.wait()
Path(file).write_text("SIGTERM" if signalled and status in OBEYED else str(status))
