"""The user's own settings file: what goes for every command that this user runs, e.g. whose code may be named.

It lies where the platform keeps settings: `~/.config/fedspan/settings.toml` on Linux, `~/Library/Application
Support/fedspan/settings.toml` on macOS, `%APPDATA%\\fedspan\\settings.toml` on Windows. `FEDSPAN_SETTINGS` names
another file, or none if it is empty.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import typer

from fedspan.errors import ConfigError

VARIABLE = "FEDSPAN_SETTINGS"
FILE = "settings.toml"


@dataclass(frozen=True, kw_only=True)
class UserSettings:
    """What a user has settled for all commands."""

    allow_code: tuple[str, ...] = ()
    """Packages whose code experiments and run directories may name."""


def settings_path() -> Path | None:
    """The user's settings file; None if there is none.

    Raises:
        ConfigError: if `FEDSPAN_SETTINGS` names a file that is not there.
    """
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    path = Path(typer.get_app_dir("fedspan")) / FILE if named is None else Path(named).expanduser()
    if path.is_file():
        return path
    if named is not None:
        raise ConfigError(f"{VARIABLE}: must name a file. Got {named[:200]!r}; make it, or unset the variable.")
    return None


def read_user_settings() -> UserSettings:
    """The user's settings; the defaults if there is no file.

    Raises:
        ConfigError: if it cannot be read, or something in it does not fit.
    """
    path = settings_path()
    if path is None:
        return UserSettings()
    from fedspan.method.fields import build
    from fedspan.method.named_code import checked_packages
    from fedspan.storage.toml import parse_toml, read_small

    settings = build(UserSettings, parse_toml(read_small(path, "Settings"), str(path)), f"Settings {path}")
    checked_packages(settings.allow_code, f"Settings {path}: allow_code")
    return settings
