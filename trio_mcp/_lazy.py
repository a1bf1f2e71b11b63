"""Lazy public names: a package offers names without loading the modules that define them.

`import trio_mcp` must be fast, and a small server must load only the modules that it uses.  So the `__init__` of each
package has a table of its public names, and a module is loaded when one of its names is first used.
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

    `modules` maps modules below `root` (by default the package itself) to the names that they define, separated by
    spaces.
    """
    homes = {name: f"{root or package}.{module}" for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # later lookups do not come here
        return value

    def __dir__() -> list[str]:
        return sorted({*homes, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return __getattr__, __dir__
