"""`fedspan new`: files to start from."""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedspan.cli.console import say
from fedspan.errors import ConfigError

new = typer.Typer(no_args_is_help=True, help="Write files to start from: a method of your own with its tests.")
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The module's name: small letters, digits and _.", show_default=False)
]
TEMPLATES = {"{}.py": "method.py.txt", "test_{}.py": "test_method.py.txt", "{}.toml": "method.toml.txt"}


@new.callback()
def _new() -> None:
    """Write files to start from: a method of your own with its tests."""


@new.command()
def method(name: Name) -> None:
    """Write a working method, its tests and an experiment into this folder; nothing is overwritten."""
    _check(name)
    cls = class_name(name)
    texts = {Path(file.format(name)): _filled(template, name, cls) for file, template in TEMPLATES.items()}
    for path in texts:
        if path.exists():
            raise ConfigError(f"new method: {path} must not exist yet. Remove it, or choose another name.")
    for path, text in texts.items():
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
    say(f"Written: {', '.join(map(str, texts))}. Try:")
    for command in commands(name, cls):
        say(f"  {command}")


def commands(name: str, cls: str) -> list[str]:
    """What to try first: the promises, a run, and a comparison."""
    return [
        f"python -m pytest test_{name}.py",
        f"PYTHONPATH=. fedspan run {name}.toml --allow-code {name}",
        f"PYTHONPATH=. fedspan compare {name}.toml --methods fedavg,{name}:{cls} --allow-code {name}",
    ]


def class_name(name: str) -> str:
    """The class of a module: my_method becomes MyMethod."""
    return "".join(part.capitalize() for part in name.split("_"))


def _check(name: str) -> None:
    if (
        not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name)
        or keyword.iskeyword(name)
        or not class_name(name).isidentifier()
    ):
        raise ConfigError(
            f"new method: NAME must be small letters, digits and _, beginning with a letter. Got {name[:60]!r}."
        )
    if not Path(f"{name}.py").exists() and importlib.util.find_spec(name) is not None:
        raise ConfigError(f"new method: NAME must not be that of a module that Python finds already. Got '{name}'.")


def _filled(template: str, name: str, cls: str) -> str:
    text = resources.files("fedspan.cli").joinpath("templates", template).read_text(encoding="utf-8")
    return text.replace("test_CLASS", f"test_{name}").replace("CLASS", cls).replace("NAME", name)
