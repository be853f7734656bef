"""A hook of mkdocs: the explorer among the files of the documentation, as `tg explore` makes it."""

from __future__ import annotations

from typing import Any

FOLDER = "explorer"


def on_files(files: Any, config: Any) -> Any:
    """Add what `tg explore --static` would write, so that the two are never apart."""
    from mkdocs.structure.files import File

    from threshold_gating.show import explorer

    for name, content in explorer.files().items():
        files.append(File.generated(config, f"{FOLDER}/{name}", content=content))
    return files
