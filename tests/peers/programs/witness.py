"""How a server on stdio ended, whose client does not tell: ``witness.py FILE COMMAND ...``.

It runs the command with its own standard streams, passes SIGTERM on, and leaves the exit status in the file.
"""

import signal
import subprocess
import sys
from pathlib import Path

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
Path(file).write_text(str(process.wait()))
