"""The report: one HTML page that opens offline and says what was decided, why, and what it is predicted to cost."""

from autoplan.report.comparison import Row, comparison
from autoplan.report.page import html

__all__ = ["Row", "comparison", "html"]
