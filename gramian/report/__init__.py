"""The report of runs: `write_report` reads run folders and writes one HTML page that needs no network."""

from gramian.report.report_file import write_report

__all__ = ["write_report"]
