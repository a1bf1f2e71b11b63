"""Names that a package offers without loading the modules that own them.

`import trio_mcp` must cost nothing, and a tiny server must load no more than it uses.  So the `__init__` of each room
has a table of its public names, and a module is loaded when one of its names is used for the first time.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, modules: Mapping[str, str], root: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    `modules` maps modules below `root` (by default the package itself) to the names that they own, separated by spaces.
    """
    homes = {name: f"{root or package}.{module}" for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # found once
        return value

    def __dir__() -> list[str]:
        return sorted({*homes, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return __getattr__, __dir__
