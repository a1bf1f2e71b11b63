"""Skills: directories with instructions for a model, which a server offers and a client verifies (SEP-2640)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_mcp._lazy import lazy_names

if TYPE_CHECKING:
    from trio_mcp.extensions.skills.client import Skills as Skills
    from trio_mcp.extensions.skills.entries import Skill as Skill
    from trio_mcp.extensions.skills.entries import SkillFile as SkillFile
    from trio_mcp.extensions.skills.entries import SkillNotVerified as SkillNotVerified
    from trio_mcp.extensions.skills.server import add_skills as add_skills
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "extensions.skills.client": "Skills",
            "extensions.skills.entries": "Skill SkillFile SkillNotVerified",
            "extensions.skills.server": "add_skills",
        },
        "trio_mcp",
    )
