"""Where a language model lies, and whether the libraries for it are there."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedspan.errors import ConfigError

Place: TypeAlias = Literal["built", "huggingface", "llama2c", "hub"]
"""Built from configuration, a folder of Hugging Face's, one of llama2.c's, or a name on the hub."""


def library(name: str) -> Any:
    """transformers, tokenizers or peft.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"Language models need {name.partition('.')[0]}, which cannot be imported ({error}). Install it with"
            " pip install 'fedspan[llm]'."
        ) from error


def find(path: str) -> tuple[Place, Path]:
    """What `path` means: '' is a model built from configuration; a folder is looked for here, then in $FEDSPAN_DATA.

    Raises:
        ConfigError: if there is no such folder, or it holds no model.
    """
    if not path:
        return "built", Path()
    root = os.environ.get("FEDSPAN_DATA")
    places = [Path(path).expanduser(), *([Path(root).expanduser() / path] if root else [])]
    for place in places:
        if place.is_dir():
            if (place / "config.json").is_file():
                return "huggingface", place
            if len(list(place.glob("*.bin"))) == 2 and list(place.glob("tok*.bin")):
                return "llama2c", place
            raise ConfigError(
                f"Language model: {place} must hold config.json and safetensors (Hugging Face), or one model and one"
                " tok*.bin (llama2.c). It holds neither."
            )
    if path.count("/") == 1 and not path.startswith((".", "~", "/")):
        return "hub", Path(path)
    raise ConfigError(
        f"Language model: path must be a folder or a name OWNER/NAME of the hub. Got {path[:80]!r}; looked at"
        f" {', '.join(map(str, places))}."
    )
