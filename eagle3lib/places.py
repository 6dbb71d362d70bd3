"""Places: what a relative name means. A stage's kernel runs in the notebooks' folder, the command line anywhere: so a name is looked
up in the caller's folder and then in the repository, by everybody alike."""

from __future__ import annotations

import glob
from pathlib import Path

from eagle3lib import runs
from eagle3lib.errors import ParamError


def located(name: str) -> Path:
    """The path that a name means: in the caller's folder when something is there, else in the repository. ParamError: it can be none."""
    path = _path(name)
    return path if path.exists() else runs.repo_root() / path


def matches(name: str) -> list[Path]:
    """What a glob means, sorted; by the same rule."""
    return next(filter(None, (in_folder(base, name) for base in (Path(), runs.repo_root()))), [])


def in_folder(base: Path, name: str) -> list[Path]:
    """The path, or all that a glob means, for a caller in folder `base`; [] when nothing is there."""
    path = base / _path(name)
    if path.exists():
        return [path]
    return sorted(map(Path, glob.glob(str(path), recursive=True))) if glob.has_magic(name) else []


def _path(name: str) -> Path:
    try:
        path = Path(name).expanduser()
        path.exists()  # raises on what no file system takes
    except (OSError, RuntimeError) as error:
        raise ParamError(f"{name[:80]!r} can be no path: {getattr(error, 'strerror', None) or error}") from None
    return path
