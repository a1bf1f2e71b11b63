"""How a server on stdio ended, whose client does not tell: ``witness.py FILE COMMAND ...``.

It runs the command with its own standard streams, passes SIGTERM on, and leaves the exit status in the file.
"""

import signal
import subprocess
import sys
from pathlib import Path

file, *command = sys.argv[1:]
with subprocess.Popen(command) as process:
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    Path(file).write_text(str(process.wait()))
