"""`--allow-code PACKAGE`: which packages an experiment may name code of, on every command that assembles one.

Those that the user's own settings file lists are allowed besides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedspan.cli.user_settings import read_user_settings

AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-code",
        metavar="PACKAGE",
        help="Let the experiment name code of this package, as package.module:Class; may be repeated.",
        show_default=False,
    ),
]


def with_code(command: Callable[..., Any], *, settings: bool = True) -> Callable[..., Any]:
    """The command with the option `--allow-code`, which goes for all that the command does.

    Args:
        settings: whether packages of the user's settings file are allowed too: not to a node, which serves others.
    """
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def allowing(*args: Any, allow_code: list[str] | None = None, **kwargs: Any) -> Any:
        usual = read_user_settings().allow_code if settings else ()
        if not allow_code and not usual:
            return command(*args, **kwargs)
        from fedspan.method.named_code import allowance, checked_packages, only_allowing

        now = allowance()
        with only_allowing(now.packages | checked_packages(allow_code or (), "--allow-code") | {*usual}, now.remedy):
            return command(*args, **kwargs)

    option = inspect.Parameter("allow_code", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=AllowCode)
    parameters = [*signature.parameters.values(), option]
    allowing.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    allowing.__annotations__ = {p.name: p.annotation for p in parameters}
    return allowing
