"""Tables, figures and a one-file HTML page from finished run directories."""

from fedspan.report.canvas import save
from fedspan.report.page import write_page
from fedspan.report.runs import load_runs
from fedspan.report.tables import summary_rows, to_csv, to_latex, to_markdown, to_rich

__all__ = ["load_runs", "save", "summary_rows", "to_csv", "to_latex", "to_markdown", "to_rich", "write_page"]
