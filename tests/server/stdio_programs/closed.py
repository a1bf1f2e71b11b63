"""`tools`, started without a stderr."""

import os
import runpy
import sys
from pathlib import Path

if len(sys.argv) > 1:
    os.close(2)
    os.execv(sys.executable, [sys.executable, __file__])
runpy.run_path(str(Path(__file__).parent / "tools.py"), run_name="__main__")
