"""What a page is made of besides its words: style sheet, script and the drawing library. Nothing is fetched."""

from __future__ import annotations

import base64
import gzip
import hashlib
from functools import cache
from importlib import resources

from fedspan.errors import FedspanError


@cache
def asset(name: str) -> str:
    """A file of `static/`."""
    return resources.files("fedspan.report").joinpath("static", name).read_text(encoding="utf-8")


@cache
def plotly() -> str:
    """The drawing library, plotly.js, as text.

    Raises:
        FedspanError: if plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise FedspanError("Report: a page needs plotly; use `pip install 'fedspan[report]'`.") from None
    text: str = get_plotlyjs()
    return text


@cache
def packed_plotly() -> str:
    """The library as it stands in a page: 4.8 MB would break every mail; compressed and in letters it is 2 MB."""
    return base64.b64encode(gzip.compress(plotly().encode(), 9, mtime=0)).decode()


@cache
def digest(text: str) -> str:
    """How a content security policy names a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
