"""The pictures of `docs/gallery.md`: `python docs/make_gallery.py`, or `make gallery`.

They are drawn from the runs of `fedspan demo`, which are made if they are not there. Screenshots need Chromium; without
it the old ones are kept.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path

from PIL import Image

from fedspan.report import figures as drawn
from fedspan.report import load_runs, save, write_page
from fedspan.report.charts import figure_of
from fedspan.report.paired import differences_figure
from fedspan.report.registered import panels_of, seen_of
from fedspan.report.runs import load_run

HERE = Path(__file__).parent
LIMIT = 150_000  # bytes of a picture


def small(path: Path) -> None:
    """Cut a picture down to few colours, and in size, as far as needed."""
    picture = Image.open(path).convert("RGB")
    for colours, scale in ((None, 1.0), (256, 1.0), (64, 1.0), (64, 0.7)):
        size = (round(picture.width * scale), round(picture.height * scale))
        made = picture if scale == 1.0 else picture.resize(size, Image.Resampling.LANCZOS)
        out = io.BytesIO()
        (made if colours is None else made.quantize(colours)).save(out, "PNG", optimize=True)
        if out.tell() < LIMIT:
            break
    path.write_bytes(out.getvalue())


def screenshots(page: Path, out: Path) -> bool:
    """The page as a browser shows it: light, dark, and on a phone."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from browser import CHROMIUM, browser

    if CHROMIUM is None:
        return False
    with browser() as tab:
        for name, width, height, dark, place in (
            ("page-light", 1200, 820, False, "h1"),
            ("page-dark", 1200, 960, True, ".legend"),
            ("page-phone", 390, 800, False, ".legend"),
        ):
            tab.look(width, height, dark, phone=width < 500)
            tab.open(page.resolve().as_uri())
            tab.wait("document.documentElement.dataset.figures === 'drawn'", 300)
            tab.ask(f"document.querySelector('{place}').scrollIntoView(); scrollBy(0, {-60 if place == 'h1' else 0})")
            small(tab.picture(out / f"{name}.png", whole=False))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"), help="where `fedspan demo` wrote")
    parser.add_argument("--out", type=Path, default=HERE / "gallery")
    chosen = parser.parse_args()
    if not any(chosen.runs.glob("*/result.json")):
        subprocess.run([sys.executable, "-m", "fedspan.cli.app", "demo", "--out", str(chosen.runs)], check=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    runs = load_runs(chosen.runs)
    drawn.curves(runs, chosen.out / "over-rounds.png")
    drawn.curves(runs, chosen.out / "over-bytes.png", x="bytes")
    drawn.clients(runs, chosen.out / "clients.png")
    drawn.bytes_bars(runs, chosen.out / "bytes.png")
    save(lambda: differences_figure(runs), chosen.out / "differences.png")
    run = load_run(chosen.runs / "pfl-mf-0")
    shown = {d.name: d for p in panels_of(run) for d in p.look(seen_of(run, run.method)).drawings}
    save(lambda: figure_of(shown["embedding"]), chosen.out / "coordinates.png")
    save(lambda: figure_of(shown["singular_values"]), chosen.out / "singular-values.png")
    for path in chosen.out.glob("*.png"):
        if not path.name.startswith("page-"):
            small(path)
    page = write_page(runs, chosen.runs / "report.html", "fedspan demo")
    if not screenshots(page, chosen.out):
        print("No Chromium on this machine: the pictures of the page are kept as they are.")
    for path in sorted(chosen.out.glob("*.png")):
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
